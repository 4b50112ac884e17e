-- Reports the work that a parameter server applied to its shard. Idempotent.
-- KEYS  1 work  2 leases  3 holders  4 open  5 done  6 evaluations  7 shards  8 applied
--       9 counters
-- ARGV  1 shard  2 number of shards  3 server token  4 version  5 finished epochs
--       6 totals, as JSON  7 applied samples  8 newest evaluation point  9… done subtasks
-- Returns 1, or 0 if the ledger already has a newer report.
-- A subtask is done, an epoch finished, and a point reached once it is so in every shard.
-- Every finished epoch is evaluated, or else the newest point: others between two reports are not.
local shard, version, finished = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
local work = redis.call('HMGET', KEYS[1], 'per_epoch', 'finished', 'points')
if not work[2] then return 0 end
-- missing until the controller starts the job; nothing is applied before
local per_epoch = tonumber(work[1]) or 0
local function of(name) return shard .. ':' .. name end
local known = redis.call('HMGET', KEYS[7], of('token'), of('version'), of('finished'))
local token = tonumber(known[1] or 0)
if token > tonumber(ARGV[3]) then
  return redis.error_reply('FENCED a parameter server with token ' .. known[1] .. ' has taken over')
end
if token == tonumber(ARGV[3]) and tonumber(known[2] or -1) > version then return 0 end
redis.call('HSET', KEYS[7], of('token'), ARGV[3], of('version'), version,
  of('finished'), finished, of('totals'), ARGV[6], of('samples'), ARGV[7], of('point'), ARGV[8])

local finished_in, everywhere, point = {}, finished, tonumber(ARGV[8])
for each = 0, tonumber(ARGV[2]) - 1 do
  finished_in[each] = tonumber(redis.call('HGET', KEYS[7], each .. ':finished') or 0)
  everywhere = math.min(everywhere, finished_in[each])
  point = math.min(point, tonumber(redis.call('HGET', KEYS[7], each .. ':point') or 0))
end
local function is_done(subtask)
  for each, epochs in pairs(finished_in) do
    if subtask >= epochs * per_epoch
      and redis.call('SISMEMBER', KEYS[8], each .. ':' .. subtask) == 0 then return false end
  end
  return true
end
local function settle(subtask)
  if not is_done(subtask) then return end
  -- subtasks of finished epochs are only counted, also if this report is repeated
  redis.call(subtask < everywhere * per_epoch and 'SREM' or 'SADD', KEYS[5], subtask)
  local piece = 'train:' .. subtask
  redis.call('ZREM', KEYS[2], piece)
  redis.call('HDEL', KEYS[3], piece)
  redis.call('ZREM', KEYS[4], piece)
  redis.call('HDEL', KEYS[9], 'again:' .. subtask)
end
for i = 9, #ARGV do
  local subtask = tonumber(ARGV[i])
  if subtask >= finished * per_epoch then redis.call('SADD', KEYS[8], of(subtask)) end
  settle(subtask)
end
for subtask = tonumber(known[3] or 0) * per_epoch, finished * per_epoch - 1 do
  redis.call('SREM', KEYS[8], of(subtask))
  settle(subtask)
end
local before = tonumber(work[2])
redis.call('HSET', KEYS[1], 'finished', everywhere)
for subtask = before * per_epoch, everywhere * per_epoch - 1 do settle(subtask) end
local function evaluate(number)
  local piece = 'evaluate:' .. number
  if redis.call('HEXISTS', KEYS[6], number) == 0 and not redis.call('ZSCORE', KEYS[2], piece) then
    redis.call('ZADD', KEYS[4], 'NX', -1, piece)
  end
end
if work[3] ~= 'samples' then
  for epoch = before + 1, everywhere do evaluate(epoch) end
elseif point > 0 then
  evaluate(string.format('%.0f', point))
end
return 1
