-- Lets a parameter server take over a shard, and fences older ones.
-- KEYS  1 fence
-- ARGV  1 token
local held = tonumber(redis.call('GET', KEYS[1]) or 0)
if held > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a parameter server with token ' .. held .. ' has taken over')
end
redis.call('SET', KEYS[1], ARGV[1])
return 1
