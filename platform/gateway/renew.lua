-- Renews the leases of what a gateway serves, and says what is not its own any more.
-- KEYS: for each response its record and its lease, '' where it holds none. ARGV: gateway, when a lease runs out (ms),
-- each response's id. A record without a gateway (rebuild.lua) is whoever's serves it; one that is not there says nothing.
-- A lease that ran out while nobody could renew it is taken again as long as its response goes on.
-- Returns a number for each: 0 it is this gateway's, 1 another's, 2 it has ended.

local gateway, expires_at_ms = ARGV[1], ARGV[2]
local found = {}
for n = 1, #ARGV - 2 do
  local record, lease, id = KEYS[2 * n - 1], KEYS[2 * n], ARGV[2 + n]
  local held = redis.call('HMGET', record, 'state', 'gateway')
  found[n] = 0
  if held[2] and held[2] ~= gateway then
    found[n] = 1
  elseif held[1] == 'done' then
    found[n] = 2
  elseif lease ~= '' and held[1] == 'open' then
    redis.call('ZADD', lease, expires_at_ms, id)
    redis.call('EXPIRE', lease, 86400)
  elseif lease ~= '' then
    redis.call('ZADD', lease, 'XX', expires_at_ms, id)
  end
end
return found
