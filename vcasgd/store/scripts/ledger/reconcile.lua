-- Makes the ledger agree with the applied record of a shard's snapshot, after a parameter server
-- took over or went back to an older snapshot.
-- KEYS  1 work  2 leases  3 holders  4 open  5 done  6 evaluations  7 shards  8 applied
--       9 counters
-- ARGV  1 shard  2 number of shards  3 server token  4 version  5 finished epochs
--       6 totals, as JSON  7 applied samples  8 newest evaluation point
--       9 '1' if the first snapshot must be created again  10… done subtasks
-- Returns the number of reopened subtasks.
-- A subtask is done, an epoch finished, and a point reached once it is so in every shard.
local shard, finished = ARGV[1], tonumber(ARGV[5])
local work = redis.call('HMGET', KEYS[1], 'per_epoch', 'total', 'finished', 'points')
if not work[3] then return 0 end
-- missing until the controller starts the job; nothing is applied before
local per_epoch, total = tonumber(work[1]) or 0, tonumber(work[2]) or 0
-- a worker can write any number, and a loop up to it would block the ledger
local next = math.min(tonumber(redis.call('HGET', KEYS[9], 'next')) or 0, total)
local token = redis.call('HGET', KEYS[7], shard .. ':token') or '0'
if tonumber(token) > tonumber(ARGV[3]) then
  return redis.error_reply('FENCED a parameter server with token ' .. token .. ' has taken over')
end
redis.call('HSET', KEYS[7], shard .. ':token', ARGV[3], shard .. ':version', ARGV[4],
  shard .. ':finished', finished, shard .. ':totals', ARGV[6],
  shard .. ':samples', ARGV[7], shard .. ':point', ARGV[8])

for _, member in ipairs(redis.call('SMEMBERS', KEYS[8])) do
  local of, subtask = string.match(member, '^(%d+):(%d+)$')
  if of == shard then redis.call('SREM', KEYS[8], member) end
  -- every applied subtask has been leased
  next = math.max(next, of == shard and 0 or tonumber(subtask) + 1)
end
for i = 10, #ARGV do
  redis.call('SADD', KEYS[8], shard .. ':' .. ARGV[i])
  next = math.max(next, tonumber(ARGV[i]) + 1)
end
local finished_in, everywhere = {}, finished
local samples, point = tonumber(ARGV[7]), tonumber(ARGV[8])
for each = 0, tonumber(ARGV[2]) - 1 do
  finished_in[each] = tonumber(redis.call('HGET', KEYS[7], each .. ':finished') or 0)
  everywhere = math.min(everywhere, finished_in[each])
  samples = math.min(samples, tonumber(redis.call('HGET', KEYS[7], each .. ':samples') or 0))
  point = math.min(point, tonumber(redis.call('HGET', KEYS[7], each .. ':point') or 0))
  next = math.max(next, finished_in[each] * per_epoch)
end
redis.call('HSET', KEYS[1], 'finished', everywhere)
redis.call('HSET', KEYS[9], 'next', next)
local function is_done(subtask)
  for each, epochs in pairs(finished_in) do
    if subtask >= epochs * per_epoch
      and redis.call('SISMEMBER', KEYS[8], each .. ':' .. subtask) == 0 then return false end
  end
  return true
end

-- evaluations are numbered by epochs or by samples
local by_samples = work[4] == 'samples'
local last = by_samples and samples or everywhere
for _, key in ipairs({KEYS[2], KEYS[4]}) do
  for _, piece in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    local kind, number = string.match(piece, '^(%a+):(%d+)$')
    number = tonumber(number)
    if (kind == 'train' and is_done(number)) or (kind == 'evaluate' and number > last) then
      redis.call('ZREM', KEYS[2], piece)
      redis.call('HDEL', KEYS[3], piece)
      redis.call('ZREM', KEYS[4], piece)
    end
  end
end
local reopened = 0
redis.call('DEL', KEYS[5])
for subtask = everywhere * per_epoch, next - 1 do
  local piece = 'train:' .. subtask
  if is_done(subtask) then
    redis.call('SADD', KEYS[5], subtask)
  elseif not redis.call('ZSCORE', KEYS[2], piece) then
    reopened = reopened + redis.call('ZADD', KEYS[4], 'NX', subtask, piece)
  end
end
-- drop results of evaluations that are no longer in the model
for _, number in ipairs(redis.call('HKEYS', KEYS[6])) do
  if tonumber(number) > last then redis.call('HDEL', KEYS[6], number) end
end
local function evaluate(number)
  local piece = 'evaluate:' .. number
  if redis.call('HEXISTS', KEYS[6], number) == 0 and not redis.call('ZSCORE', KEYS[2], piece) then
    redis.call('ZADD', KEYS[4], 'NX', -1, piece)
  end
end
if not by_samples then
  for epoch = 1, everywhere do evaluate(epoch) end
elseif point > 0 then
  evaluate(string.format('%.0f', point))
end
if ARGV[9] == '1' and not redis.call('ZSCORE', KEYS[2], 'initialise:0') then
  redis.call('ZADD', KEYS[4], -2, 'initialise:0')
end
return reopened
