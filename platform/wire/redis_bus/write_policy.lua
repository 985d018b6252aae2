-- Puts a policy in force and tells everybody. KEYS: current, version, channel. ARGV: version, document.

redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1])
return redis.call('PUBLISH', KEYS[3], ARGV[1])
