-- Makes the ledger agree with a snapshot's applied record: after a parameter server took
-- over, or went back to an older snapshot.
-- KEYS  1 record  2 work  3 leases  4 holders  5 open  6 done  7 evaluations
-- ARGV  1 server token  2 version  3 finished epochs  4 totals, as JSON
--       5 '1' where the first snapshot has to be made again  6… done subtasks
-- Returns how many subtasks were opened again.
local known = redis.call('HMGET', KEYS[2], 'server_token', 'next', 'per_epoch', 'total')
if not known[3] then return 0 end
local token, finished = tonumber(ARGV[1]), tonumber(ARGV[3])
if tonumber(known[1] or 0) > token then
  return redis.error_reply('FENCED a parameter server with token ' .. known[1] .. ' has taken over')
end
redis.call('HSET', KEYS[2], 'server_token', ARGV[1], 'version', ARGV[2], 'finished', finished)
redis.call('HSET', KEYS[1], 'totals', ARGV[4])

local next, per_epoch = tonumber(known[2]), tonumber(known[3])
redis.call('DEL', KEYS[6])
for i = 6, #ARGV do
  redis.call('SADD', KEYS[6], ARGV[i])
  next = math.max(next, tonumber(ARGV[i]) + 1)
end
next = math.max(next, finished * per_epoch)
redis.call('HSET', KEYS[2], 'next', next)

local function drop(piece)
  redis.call('ZREM', KEYS[3], piece)
  redis.call('HDEL', KEYS[4], piece)
  redis.call('ZREM', KEYS[5], piece)
end
for _, key in ipairs({KEYS[3], KEYS[5]}) do
  for _, piece in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    local kind, number = string.match(piece, '^(%a+):(%d+)$')
    number = tonumber(number)
    if kind == 'train' then
      if number < finished * per_epoch or redis.call('SISMEMBER', KEYS[6], number) == 1 then
        drop(piece)
      end
    elseif kind == 'evaluate' and number > finished then
      drop(piece)
    end
  end
end
local reopened = 0
for subtask = finished * per_epoch, next - 1 do
  local piece = 'train:' .. subtask
  if redis.call('SISMEMBER', KEYS[6], subtask) == 0
    and not redis.call('ZSCORE', KEYS[3], piece) then
    reopened = reopened + redis.call('ZADD', KEYS[5], 'NX', subtask, piece)
  end
end
-- results of epochs that are no longer in the model say nothing about it
for _, epoch in ipairs(redis.call('HKEYS', KEYS[7])) do
  if tonumber(epoch) > finished then redis.call('HDEL', KEYS[7], epoch) end
end
for epoch = 1, finished do
  local piece = 'evaluate:' .. epoch
  if redis.call('HEXISTS', KEYS[7], epoch) == 0 and not redis.call('ZSCORE', KEYS[3], piece) then
    redis.call('ZADD', KEYS[5], 'NX', -1, piece)
  end
end
if ARGV[5] == '1' and not redis.call('ZSCORE', KEYS[3], 'initialise:0') then
  redis.call('ZADD', KEYS[5], -2, 'initialise:0')
end
return reopened
