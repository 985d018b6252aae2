-- Lets all responses of one request in against every limit at once, or takes nothing at all (and notes a window's
-- first refusal for money). Shapes of all keys: wire/redis_keys.py.
-- ARGV[1] the bundles as JSON (admission.py): the request in the class it asks for and, where the policy lets it
-- overflow, in a lower one. The first that every limit holds is taken. ARGV[2...] the encoded Reserved of each response
-- of the first bundle, then of the next.
-- Returns {"admitted", now_ms, number of the bundle, level...}, a level per bucket, or, of the first bundle,
-- {"<kind of the limit>", now_ms, retry_after_ms, level...}.
-- A bucket holds whole tokens in ``level`` and the rest of its refill in ``fraction``, in 1/60000 of a token, so that a
-- limit per minute times elapsed milliseconds stays an exact integer.

local UNITS = 60000

local bundles = cjson.decode(ARGV[1])
local first = bundles[1]
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

local function levels_of(bundle)
  local levels, fractions = {}, {}
  for i, bucket in ipairs(bundle.buckets) do
    levels[i], fractions[i] = filled(bucket)
  end
  return levels, fractions
end

local function answer(kind, number, levels)
  local reply = { kind, now_ms, math.ceil(number) }
  for _, level in ipairs(levels) do table.insert(reply, level) end
  return reply
end

-- The kind of the first limit that does not hold the bundle, how long that lasts, and of money its window's key; nil where
-- all do.
local function refusing(bundle, levels, fractions)
  for i, bucket in ipairs(bundle.buckets) do
    if levels[i] < bucket.amount then
      local missing_units = (bucket.amount - levels[i]) * UNITS - fractions[i]
      return bucket.kind, missing_units / math.max(bucket.limit, 1)
    end
  end
  for _, lease in ipairs(bundle.leases) do
    redis.call('ZREMRANGEBYSCORE', lease.key, '-inf', now_ms) -- nobody renews these: their gateway is gone
    if lease.limit >= 0 and redis.call('ZCARD', lease.key) + #bundle.responses > lease.limit then
      return 'concurrency', 1000
    end
  end
  for _, money in ipairs(bundle.money) do
    if money.cap >= 0 then
      local held = redis.call('HMGET', money.key, 'open', 'settled')
      if tonumber(held[1] or 0) + tonumber(held[2] or 0) + money.amount > money.cap then
        return 'money', 0, money.key
      end
    end
  end
end

local function take(bundle, levels, fractions, first_reserved)
  for i, bucket in ipairs(bundle.buckets) do
    levels[i] = levels[i] - bucket.amount
    redis.call('HSET', bucket.key, 'level', whole(levels[i]), 'fraction', whole(fractions[i]), 'at_ms', whole(now_ms),
      'capacity', whole(bucket.limit))
    redis.call('EXPIRE', bucket.key, 86400)
  end
  for _, lease in ipairs(bundle.leases) do
    for _, response in ipairs(bundle.responses) do
      redis.call('ZADD', lease.key, now_ms + bundle.lease_ms, response.id)
    end
    redis.call('EXPIRE', lease.key, 86400)
  end
  for _, money in ipairs(bundle.money) do
    redis.call('HINCRBY', money.key, 'open', whole(money.amount))
    redis.call('HSETNX', money.key, 'settled', 0)
    redis.call('EXPIRE', money.key, 3456000) -- 40 days: longer than any window
  end
  for i, response in ipairs(bundle.responses) do
    local fields = {}
    for name, value in pairs(response.fields) do
      table.insert(fields, name)
      table.insert(fields, value)
    end
    redis.call('HSET', response.record, unpack(fields))
    redis.call('EXPIRE', response.record, bundle.record_s)
    redis.call('XADD', bundle.usage, '*', 'm', ARGV[first_reserved + i - 1])
  end
end

if redis.call('EXISTS', first.built) == 0 then return answer('lost', 1000, levels_of(first)) end -- held is not owed
if redis.call('XLEN', first.usage) + #first.responses > first.usage_limit then
  return answer('full', 1000, levels_of(first))
end
for _, response in ipairs(first.responses) do
  if redis.call('EXISTS', response.record) == 1 then return answer('duplicate', 0, levels_of(first)) end
end

local refusal, exhausted = nil, {}
for number, bundle in ipairs(bundles) do
  local levels, fractions = levels_of(bundle)
  local kind, retry_after_ms, window = refusing(bundle, levels, fractions)
  if not kind then
    take(bundle, levels, fractions, 2 + (number - 1) * #first.responses)
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
