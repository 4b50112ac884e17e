#!lua flags=allow-oom
-- Reports the work that a parameter server applied to its shard. Idempotent.
-- KEYS  1 work  2 leases  3 holders  4 open  5 evaluations  6 shards  7 blocks  8 counters
-- ARGV  1 shard  2 number of shards  3 server token  4 version  5 finished epochs
--       6 totals, as JSON  7 applied samples  8 newest evaluation point
--       9… done subtasks, a bounded number
-- Returns 1, or 0 if the ledger already has a newer report.
-- A subtask is done, an epoch finished, and a point reached once it is so in every shard.
-- Every finished epoch is evaluated, or else the newest point: others between two reports are not.
-- Includes ledger/applied.lua
local shard, shards = ARGV[1], tonumber(ARGV[2])
local version, finished = tonumber(ARGV[4]), tonumber(ARGV[5])
local work = redis.call('HMGET', KEYS[1], 'per_epoch', 'finished', 'points')
if not work[2] then return 0 end
-- missing until the controller starts the job; nothing is applied before
local per_epoch = tonumber(work[1]) or 0
local function of(name) return shard .. ':' .. name end
local known = redis.call('HMGET', KEYS[6], of('token'), of('version'), of('cleared'))
local token = tonumber(known[1] or 0)
if token > tonumber(ARGV[3]) then
  return redis.error_reply('FENCED a parameter server with token ' .. known[1] .. ' has taken over')
end
if token == tonumber(ARGV[3]) and tonumber(known[2] or -1) > version then return 0 end

-- Blocks of finished epochs, a bounded number; the others follow with the next reports.
local cleared = tonumber(known[3] or 0)
local last = math.min(math.floor(finished * per_epoch / BLOCK), cleared + 1000)
for block = cleared, last - 1 do
  redis.call('HDEL', KEYS[7], shard .. ':' .. string.format('%.0f', block))
end
redis.call('HSET', KEYS[6], of('token'), ARGV[3], of('version'), version,
  of('finished'), finished, of('totals'), ARGV[6], of('samples'), ARGV[7], of('point'), ARGV[8],
  of('cleared'), math.max(cleared, last))

local everywhere, point = finished, tonumber(ARGV[8])
for each = 0, shards - 1 do
  local other = redis.call('HMGET', KEYS[6], each .. ':finished', each .. ':point')
  everywhere = math.min(everywhere, tonumber(other[1] or 0))
  point = math.min(point, tonumber(other[2] or 0))
end
local before = tonumber(work[2])
redis.call('HSET', KEYS[1], 'finished', everywhere, 'shards', shards)

local record = applied_record(KEYS[7], KEYS[6], shards, per_epoch)
for i = 9, #ARGV do
  local subtask = tonumber(ARGV[i])
  if subtask >= finished * per_epoch then record.add(shard, subtask) end
  if record.has(subtask) then
    local piece = 'train:' .. ARGV[i]
    redis.call('ZREM', KEYS[2], piece)
    redis.call('HDEL', KEYS[3], piece)
    redis.call('ZREM', KEYS[4], piece)
    redis.call('HDEL', KEYS[8], 'again:' .. ARGV[i])
  end
end
local function evaluate(number)
  local piece = 'evaluate:' .. number
  if redis.call('HEXISTS', KEYS[5], number) == 0 and not redis.call('ZSCORE', KEYS[2], piece) then
    redis.call('ZADD', KEYS[4], 'NX', -1, piece)
  end
end
if work[3] ~= 'samples' then
  for epoch = before + 1, everywhere do evaluate(epoch) end
elseif point > 0 then
  evaluate(string.format('%.0f', point))
end
return 1
