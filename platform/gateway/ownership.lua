-- Moves the record of a response that goes on: to another worker under the next attempt, or to another gateway.
-- KEYS: record. ARGV: gateway and attempt as they must be, then gateway, attempt, worker and epoch as they become.
-- Returns 0, and changes nothing, when the response has ended or somebody else moved it first.

local held = redis.call('HMGET', KEYS[1], 'state', 'gateway', 'attempt')
if held[1] ~= 'open' or held[2] ~= ARGV[1] or held[3] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'gateway', ARGV[3], 'attempt', ARGV[4], 'worker', ARGV[5], 'epoch', ARGV[6])
return 1
