-- Builds the gate anew from the books, once. KEYS: gate:built, usage. ARGV: where the usage stream stood when the books
-- were read, the books as JSON with amounts as text (rebuild.py, _books), pattern of all money windows.
-- Returns 0 when the gate stands already, or when something has come since: then the books were read too early.

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local position = ''
if redis.call('EXISTS', KEYS[2]) == 1 then
  local about = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #about, 2 do
    if about[i] == 'last-generated-id' then position = about[i + 1] end
  end
end
if position ~= ARGV[1] then return 0 end

local books = cjson.decode(ARGV[2])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, key in ipairs(redis.call('KEYS', ARGV[3])) do redis.call('DEL', key) end -- of another life
for _, window in ipairs(books.windows) do
  redis.call('HSET', window.key, 'open', window.open, 'settled', window.settled)
  redis.call('EXPIRE', window.key, books.window_s)
end
for _, operation in ipairs(books.operations) do
  if redis.call('EXISTS', operation.key) == 0 then
    local fields = {}
    for name, value in pairs(operation.fields) do
      table.insert(fields, name)
      table.insert(fields, value)
    end
    redis.call('HSET', operation.key, unpack(fields))
    redis.call('EXPIRE', operation.key, books.record_s)
    redis.call('ZADD', operation.lease, now_ms + books.lease_ms, operation.id)
    redis.call('EXPIRE', operation.lease, 86400)
  end
end
redis.call('SET', KEYS[1], string.format('%.0f', now_ms))
return 1
