-- Everything a worker says after one step, or nothing. settle.lua stands in front of this text.
-- KEYS: epoch, sent, usage, outboxes..., records..., outputs..., counted
-- ARGV: epoch, sequence, outbox limit, usage limit, number of outboxes, of usages, of outputs, then
--       a body per outbox; (body, response id, attempt, terminal, prompt, cached, output) per usage; a body per output
-- Returns 0, -1 when fenced, -2 when the usage stream is full, n when the n-th outbox is full.

local num_outboxes, num_usages, num_outputs = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
if redis.call('GET', KEYS[2]) == ARGV[2] then return 0 end
for n = 1, num_outboxes do
  if redis.call('XLEN', KEYS[3 + n]) >= tonumber(ARGV[3]) then return n end
end
if num_usages > 0 and redis.call('XLEN', KEYS[3]) + num_usages > tonumber(ARGV[4]) then return -2 end

local argument = 8
for n = 1, num_outboxes do
  local outbox = KEYS[3 + n]
  redis.call('XADD', outbox, '*', 'm', ARGV[argument])
  redis.call('EXPIRE', outbox, 600)
  argument = argument + 1
end
for n = 1, num_usages do
  local record = KEYS[3 + num_outboxes + n]
  local counted = ARGV[1] .. ':' -- what had ended before was computed in vain: counted apart, charged to nobody
  local held = redis.pcall('HMGET', record, 'state', 'attempt')
  local is_current = not held[2] or held[2] == ARGV[argument + 2] -- another worker goes on with it otherwise
  if is_current then redis.call('XADD', KEYS[3], '*', 'm', ARGV[argument]) end
  if held[1] == 'done' or not is_current then counted = counted .. 'rework_' end
  settle(record, ARGV[argument + 1], ARGV[argument + 2], ARGV[argument + 3],
    tonumber(ARGV[argument + 4]), tonumber(ARGV[argument + 5]), tonumber(ARGV[argument + 6]))
  redis.call('HINCRBY', KEYS[#KEYS], counted .. 'prompt', ARGV[argument + 4])
  redis.call('HINCRBY', KEYS[#KEYS], counted .. 'output', ARGV[argument + 6])
  argument = argument + 7
end
for n = 1, num_outputs do
  redis.call('SET', KEYS[3 + num_outboxes + num_usages + n], ARGV[argument], 'EX', 600)
  argument = argument + 1
end
redis.call('SET', KEYS[2], ARGV[2])
return 0
