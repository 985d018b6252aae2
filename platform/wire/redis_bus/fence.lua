-- Declares an epoch dead. KEYS: epoch. ARGV: epoch. Returns 0 when the worker has already gone on to another one.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'fenced:' .. ARGV[1])
return 1
