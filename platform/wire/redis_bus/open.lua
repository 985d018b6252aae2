-- Takes a new epoch and empties the inbox. KEYS: epoch, inbox, sent, workers. ARGV: worker id. Returns the epoch.
-- It begins at Redis' own clock, so that it grows even when Redis has lost everything.

local taken = redis.call('GET', KEYS[1])
local last = taken and tonumber(string.match(taken, '%d+$')) or 0
local epoch = string.format('%.0f', math.max(last + 1, tonumber(redis.call('TIME')[1])))
redis.call('SET', KEYS[1], epoch)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('SADD', KEYS[4], ARGV[1])
return epoch
