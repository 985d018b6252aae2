-- Puts a policy in force and tells everybody, unless a newer one is. KEYS: current, version, channel.
-- ARGV: version, document. Returns 0 when refused. The same version again is taken: its prices may be others.

local held = redis.call('GET', KEYS[2])
if held and tonumber(held) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[3], ARGV[1])
return 1
