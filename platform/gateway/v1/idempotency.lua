-- One answer under an Idempotency-Key. KEYS: the key's hash. ARGV[1] is the verb, ARGV[2] who asks (a token of its own).
--   claim    ARGV: digest of the request, lease in ms -> {'mine'}, {'other'}, {'running'} or {'done', status, headers, body}
--   renew    ARGV: lease in ms
--   complete ARGV: status, headers, body, lifetime in ms
--   release
-- Only who claimed it may renew, complete and release.

local key, verb, me = KEYS[1], ARGV[1], ARGV[2]
if verb == 'claim' then
  local held = redis.call('HMGET', key, 'request', 'status', 'headers', 'body')
  if not held[1] then
    redis.call('HSET', key, 'request', ARGV[3], 'owner', me)
    redis.call('PEXPIRE', key, ARGV[4])
    return { 'mine' }
  end
  if held[1] ~= ARGV[3] then return { 'other' } end
  if not held[2] then return { 'running' } end
  return { 'done', held[2], held[3], held[4] }
end
if redis.call('HGET', key, 'owner') ~= me then return {} end
if verb == 'renew' then
  redis.call('PEXPIRE', key, ARGV[3])
elseif verb == 'complete' then
  redis.call('HSET', key, 'status', ARGV[3], 'headers', ARGV[4], 'body', ARGV[5])
  redis.call('HDEL', key, 'owner')
  redis.call('PEXPIRE', key, ARGV[6])
else
  redis.call('DEL', key)
end
return {}
