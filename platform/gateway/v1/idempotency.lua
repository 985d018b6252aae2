-- One answer under an Idempotency-Key. KEYS: the key's hash. ARGV[1] is the verb, ARGV[2] who asks (a token of its own).
--   claim    ARGV: digest of the request, operation, lease in ms, lifetime in ms -> {'mine', operation}, {'left',
--            operation of who was at work on it and has not been heard of since the lease ran out}, {'other'},
--            {'running'} or {'done', status, headers, body}
--   renew    ARGV: lease in ms
--   complete ARGV: digest of the request, operation, status, headers, body, lifetime in ms
--   release  KEYS: records of what was let in; ARGV: '1' where another was at work on it before, who may have let in
--            more. The key is free once all have ended at no charge and there is no more; until then it is as if the
--            lease had run out
-- A lease that runs out takes nothing from its owner: only who claims next does. Only the owner may renew and release.
-- Whoever has the answer of the key's operation may complete it, once: also where the key was lost.

local FREE = { shed = true, failed_platform = true, expired = true, released = true } -- as in settle.lua

local key, verb, me = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function hold(lease_ms)
  redis.call('HSET', key, 'owner', me, 'until_ms', string.format('%.0f', now_ms + lease_ms))
end

if verb == 'claim' then
  local held = redis.call('HMGET', key, 'request', 'status', 'headers', 'body', 'operation', 'until_ms')
  if not held[1] then
    redis.call('HSET', key, 'request', ARGV[3], 'operation', ARGV[4])
    hold(tonumber(ARGV[5]))
    redis.call('PEXPIRE', key, ARGV[6])
    return { 'mine', ARGV[4] }
  end
  if held[1] ~= ARGV[3] then return { 'other' } end
  if held[2] then return { 'done', held[2], held[3], held[4] } end
  if now_ms < tonumber(held[6]) then return { 'running' } end
  hold(tonumber(ARGV[5]))
  return { 'left', held[5] }
end
if verb == 'complete' then
  local held = redis.call('HMGET', key, 'operation', 'status')
  if held[2] or (held[1] and held[1] ~= ARGV[4]) then return {} end
  redis.call('HSET', key, 'request', ARGV[3], 'operation', ARGV[4], 'status', ARGV[5], 'headers', ARGV[6],
    'body', ARGV[7])
  redis.call('HDEL', key, 'owner', 'until_ms')
  redis.call('PEXPIRE', key, ARGV[8])
  return {}
end
if redis.call('HGET', key, 'owner') ~= me then return {} end
if verb == 'renew' then
  hold(tonumber(ARGV[3]))
  return {}
end
if ARGV[3] == '1' then
  hold(0)
  return {}
end
for n = 2, #KEYS do
  local held = redis.call('HMGET', KEYS[n], 'state', 'terminal')
  if held[1] and not (held[1] == 'done' and FREE[held[2]]) then
    hold(0)
    return {}
  end
end
redis.call('DEL', key)
return {}
