-- The worker's heartbeat. KEYS: epoch, load. ARGV: epoch, body, lifetime in ms. Returns -1 when fenced.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 0
