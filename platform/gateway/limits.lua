-- Lets one response in against every limit at once, or takes nothing at all (and notes a window's
-- first refusal for money). Shapes of all keys: wire/redis_keys.py.
-- ARGV[1] the wishes as JSON (admission.py, Wish): of one response, in the class it asks for and, where the policy lets
-- it overflow, in a lower one. The first that every limit holds is taken. ARGV[2...] for each the encoded Reserved.
-- Returns {"admitted", now_ms, number of the wish, level...}, a level per bucket, or, of the first wish,
-- {"<kind of the limit>", now_ms, retry_after_ms, level...}.
-- A bucket holds whole tokens in ``level`` and the rest of its refill in ``fraction``, in 1/60000 of a token, so that a
-- limit per minute times elapsed milliseconds stays an exact integer.

local UNITS = 60000

local wishes = cjson.decode(ARGV[1])
local first = wishes[1]
local now_ms = first.now_ms
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

local function levels_of(wish)
  local levels, fractions = {}, {}
  for i, bucket in ipairs(wish.buckets) do
    levels[i], fractions[i] = filled(bucket)
  end
  return levels, fractions
end

local function answer(kind, number, levels)
  local reply = { kind, now_ms, math.ceil(number) }
  for _, level in ipairs(levels) do table.insert(reply, level) end
  return reply
end

-- The kind of the first limit that does not hold the wish, how long that lasts, and of money its window's key; nil where
-- all do.
local function refusing(wish, levels, fractions)
  for i, bucket in ipairs(wish.buckets) do
    if levels[i] < bucket.amount then
      local missing_units = (bucket.amount - levels[i]) * UNITS - fractions[i]
      return bucket.kind, missing_units / math.max(bucket.limit, 1)
    end
  end
  for _, lease in ipairs(wish.leases) do
    redis.call('ZREMRANGEBYSCORE', lease.key, '-inf', now_ms) -- nobody renews these: their gateway is gone
    if lease.limit >= 0 and redis.call('ZCARD', lease.key) >= lease.limit then return 'concurrency', 1000 end
  end
  for _, money in ipairs(wish.money) do
    if money.cap >= 0 then
      local held = redis.call('HMGET', money.key, 'open', 'settled')
      if tonumber(held[1] or 0) + tonumber(held[2] or 0) + wish.money_reserved > money.cap then
        return 'money', 0, money.key
      end
    end
  end
end

local function take(wish, levels, fractions, reserved)
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
  redis.call('XADD', wish.usage, '*', 'm', reserved)
end

if redis.call('EXISTS', first.built) == 0 then return answer('lost', 1000, levels_of(first)) end -- held is not owed
if redis.call('XLEN', first.usage) >= first.usage_limit then return answer('full', 1000, levels_of(first)) end
if redis.call('EXISTS', first.record) == 1 then return answer('duplicate', 0, levels_of(first)) end

local refusal, exhausted = nil, {}
for number, wish in ipairs(wishes) do
  local levels, fractions = levels_of(wish)
  local kind, retry_after_ms, window = refusing(wish, levels, fractions)
  if not kind then
    take(wish, levels, fractions, ARGV[1 + number])
    return answer('admitted', number, levels)
  end
  refusal = refusal or answer(kind, retry_after_ms, levels)
  if window then table.insert(exhausted, window) end
end
for _, window in ipairs(exhausted) do
  redis.call('HSETNX', window, 'refused_ms', whole(now_ms)) -- the window's first: gateway.webhooks tells of it
  redis.call('EXPIRE', window, 3456000)
end
return refusal
