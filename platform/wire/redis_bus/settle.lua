-- Ends one response's record: leases, bucket refunds, money. Idempotent by state. The record's shape: redis_keys.py.

local FREE = { shed = true, failed_platform = true, expired = true, released = true }
local NO_REQUEST = { shed = true, failed_platform = true, released = true }

local function whole(number)
  return string.format('%.0f', number)
end

local function refund(bucket, amount)
  local held = redis.call('HMGET', bucket, 'level', 'capacity')
  if not (held[1] and held[2]) then return end
  local level = math.min(tonumber(held[2]), tonumber(held[1]) + amount)
  redis.call('HSET', bucket, 'level', whole(math.floor(level)))
end

local function cost_micros(record, prompt, cached, output)
  local prices = redis.call('HMGET', record, 'price_prompt', 'price_cached', 'price_output')
  local total = (prompt - cached) * tonumber(prices[1] or 0) + cached * tonumber(prices[2] or 0)
      + output * tonumber(prices[3] or 0)
  return math.ceil(total / 1000000)
end

local function each(text, visit)
  if not text then return end
  for _, item in ipairs(cjson.decode(text)) do visit(item) end
end

-- attempt '' = whatever attempt is current
local function end_record(record, response_id, attempt, terminal, prompt, cached, output)
  local held = redis.call('HMGET', record, 'state', 'attempt', 'lease_keys', 'token_refunds', 'request_refunds',
    'money_keys', 'money_reserved', 'card')
  if held[1] ~= 'open' then return end
  if attempt ~= '' and held[2] and held[2] ~= attempt then return end
  local used, cost = 0, 0
  if not FREE[terminal] then
    used = prompt + output
    cost = cost_micros(record, prompt, cached, output)
  end
  each(held[3], function(lease) redis.call('ZREM', lease, response_id) end)
  each(held[4], function(item) refund(item[1], item[2] - used) end)
  if NO_REQUEST[terminal] then
    each(held[5], function(item) refund(item[1], item[2]) end)
  end
  each(held[6], function(window)
    if redis.call('EXISTS', window) == 1 then
      redis.call('HINCRBY', window, 'open', whole(-tonumber(held[7] or 0)))
      redis.call('HINCRBY', window, 'settled', whole(cost))
    end
  end)
  redis.call('HSET', record, 'state', 'done', 'terminal', terminal, 'prompt_tokens', whole(prompt),
    'cached_tokens', whole(cached), 'output_tokens', whole(output), 'cost_micros', whole(cost))
  redis.call('EXPIRE', record, 600)
  if held[8] then redis.call('EXPIRE', held[8], 600) end
end

-- A record that cannot be read must not stop everybody's tokens: it is marked broken for reconcile, and the rest goes on.
local function settle(record, ...)
  local ended, reason = pcall(end_record, record, ...)
  if not ended then
    redis.call('HSET', record, 'state', 'broken', 'error', type(reason) == 'table' and reason.err or tostring(reason))
  end
end
