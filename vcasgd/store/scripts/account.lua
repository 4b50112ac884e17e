-- The parameter server tells what it applied. Telling it twice changes nothing.
-- KEYS  1 record  2 work  3 leases  4 holders  5 open  6 done  7 evaluations
-- ARGV  1 server token  2 version  3 finished epochs  4 totals, as JSON  5… done subtasks
-- Returns 1, or 0 where something newer is already known.
local known = redis.call('HMGET', KEYS[2], 'server_token', 'version', 'finished', 'per_epoch')
local token, version = tonumber(ARGV[1]), tonumber(ARGV[2])
if not known[4] then return 0 end
if tonumber(known[1] or 0) > token then
  return redis.error_reply('FENCED a parameter server with token ' .. known[1] .. ' has taken over')
end
if tonumber(known[1] or 0) == token and tonumber(known[2] or -1) > version then return 0 end
redis.call('HSET', KEYS[2], 'server_token', ARGV[1], 'version', version, 'finished', ARGV[3])
redis.call('HSET', KEYS[1], 'totals', ARGV[4])
local before, finished = tonumber(known[3]), tonumber(ARGV[3])
for i = 5, #ARGV do
  local piece = 'train:' .. ARGV[i]
  -- those of finished epochs are known by that number alone, also when this is told again
  if tonumber(ARGV[i]) >= finished * known[4] then redis.call('SADD', KEYS[6], ARGV[i]) end
  redis.call('ZREM', KEYS[3], piece)
  redis.call('HDEL', KEYS[4], piece)
  redis.call('ZREM', KEYS[5], piece)
end
for subtask = before * known[4], finished * known[4] - 1 do
  redis.call('SREM', KEYS[6], subtask)
  local piece = 'train:' .. subtask
  redis.call('ZREM', KEYS[3], piece)
  redis.call('HDEL', KEYS[4], piece)
  redis.call('ZREM', KEYS[5], piece)
end
for epoch = before + 1, finished do
  if redis.call('HEXISTS', KEYS[7], epoch) == 0 then
    redis.call('ZADD', KEYS[5], 'NX', -1, 'evaluate:' .. epoch)
  end
end
return 1
