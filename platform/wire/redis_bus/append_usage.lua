-- Appends to the usage stream, or -2 when it stands at its hard length; a Released also ends its record. settle.lua stands
-- in front of this text. KEYS: usage, record of a Released. ARGV: limit, body, response id.

if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -2 end
redis.call('XADD', KEYS[1], '*', 'm', ARGV[2])
if KEYS[2] then settle(KEYS[2], ARGV[3], '', 'released', 0, 0, 0) end
return 0
