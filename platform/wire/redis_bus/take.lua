-- Takes entries out of an inbox. KEYS: epoch, inbox. ARGV: epoch, entry ids. Returns -1 when fenced: a worker that was
-- declared dead must not steal its successor's input.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
return redis.call('XDEL', KEYS[2], unpack(ARGV, 2))
