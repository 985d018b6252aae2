-- Lets one response in against every limit at once, or takes nothing at all (and notes a window's first refusal for money). Shapes of all keys: wire/redis_keys.py.
-- ARGV[1] the wish as JSON (admission.py, Wish), ARGV[2] the encoded Reserved for the durable usage stream.
-- Returns {"admitted", now_ms, level...} or {"<kind of the limit>", now_ms, retry_after_ms, level...}; a level per bucket.
-- A bucket holds whole tokens in ``level`` and the rest of its refill in ``fraction``, in 1/60000 of a token, so that a
-- limit per minute times elapsed milliseconds stays an exact integer.

local UNITS = 60000

local wish = cjson.decode(ARGV[1])
local now_ms = wish.now_ms
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- What a bucket holds now: whole tokens and fraction. A bucket never seen, or gone by expiry, is full.
local function filled(bucket)
  local held = redis.call('HMGET', bucket.key, 'level', 'fraction', 'at_ms', 'capacity')
  if not held[1] then return bucket.limit, 0 end
  local level, capacity = math.floor(tonumber(held[1])), tonumber(held[4])
  local elapsed = math.max(0, now_ms - tonumber(held[3]))
  local units = tonumber(held[2]) + bucket.limit * math.min(elapsed, UNITS)
  level = level + math.floor(units / UNITS)
  if capacity < bucket.limit then level = level + bucket.limit - capacity end -- the limit was raised meanwhile
  if level >= bucket.limit then return bucket.limit, 0 end
  return level, units % UNITS
end

local levels, fractions = {}, {}
for i, bucket in ipairs(wish.buckets) do
  levels[i], fractions[i] = filled(bucket)
end

local function answer(kind, retry_after_ms)
  local reply = { kind, now_ms }
  if kind ~= 'admitted' then table.insert(reply, math.ceil(retry_after_ms)) end
  for i in ipairs(wish.buckets) do table.insert(reply, levels[i]) end
  return reply
end

if redis.call('EXISTS', wish.built) == 0 then return answer('lost', 1000) end -- what is held here is not what is owed
if redis.call('XLEN', wish.usage) >= wish.usage_limit then return answer('full', 1000) end
if redis.call('EXISTS', wish.record) == 1 then return answer('duplicate', 0) end

for i, bucket in ipairs(wish.buckets) do
  if levels[i] < bucket.amount then
    local missing_units = (bucket.amount - levels[i]) * UNITS - fractions[i]
    return answer(bucket.kind, missing_units / math.max(bucket.limit, 1))
  end
end
for _, lease in ipairs(wish.leases) do
  redis.call('ZREMRANGEBYSCORE', lease.key, '-inf', now_ms) -- nobody renews these: their gateway is gone
  if lease.limit >= 0 and redis.call('ZCARD', lease.key) >= lease.limit then return answer('concurrency', 1000) end
end
for _, money in ipairs(wish.money) do
  if money.cap >= 0 then
    local held = redis.call('HMGET', money.key, 'open', 'settled')
    if tonumber(held[1] or 0) + tonumber(held[2] or 0) + wish.money_reserved > money.cap then
      redis.call('HSETNX', money.key, 'refused_ms', whole(now_ms)) -- the window's first: gateway.webhooks tells of it
      redis.call('EXPIRE', money.key, 3456000)
      return answer('money', 0)
    end
  end
end

for i, bucket in ipairs(wish.buckets) do
  levels[i] = levels[i] - bucket.amount
  redis.call('HSET', bucket.key, 'level', whole(levels[i]), 'fraction', whole(fractions[i]), 'at_ms', whole(now_ms),
    'capacity', whole(bucket.limit))
  redis.call('EXPIRE', bucket.key, 86400)
end
for _, lease in ipairs(wish.leases) do
  redis.call('ZADD', lease.key, now_ms + wish.lease_ms, wish.response_id)
  redis.call('EXPIRE', lease.key, 86400)
end
for _, money in ipairs(wish.money) do
  redis.call('HINCRBY', money.key, 'open', whole(wish.money_reserved))
  redis.call('HSETNX', money.key, 'settled', 0)
  redis.call('EXPIRE', money.key, 3456000) -- 40 days: longer than any window
end
local fields = {}
for name, value in pairs(wish.fields) do
  table.insert(fields, name)
  table.insert(fields, value)
end
redis.call('HSET', wish.record, unpack(fields))
redis.call('EXPIRE', wish.record, wish.record_s)
redis.call('XADD', wish.usage, '*', 'm', ARGV[2])
return answer('admitted')
