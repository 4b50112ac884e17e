-- Keeps the present snapshot under the names that are wanted.
-- KEYS  1 fence  2 pins  3 wanted
-- ARGV  1 token  2 what to keep  3… names
local held = redis.call('GET', KEYS[1])
if not held then return redis.error_reply('NOSNAPSHOT') end
if tonumber(held) ~= tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a parameter server with token ' .. held .. ' has taken over')
end
for i = 3, #ARGV do
  redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[2])
  redis.call('SREM', KEYS[3], ARGV[i])
end
return 1
