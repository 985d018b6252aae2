-- Appends to a stream, or -2 when it stands at its hard length. KEYS: stream. ARGV: limit, body.

if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -2 end
redis.call('XADD', KEYS[1], '*', 'm', ARGV[2])
return 0
