#!lua flags=allow-oom
-- Pins the present snapshot under the requested names.
-- KEYS  1 fence  2 pins  3 pin-requests  4 applied
-- ARGV  1 token  2 its version  3 its description  4… names
-- Includes fence.lua
local fenced = not_held(redis.call('GET', KEYS[1]), ARGV[1])
if fenced then return fenced end
-- A failover may have brought back an older snapshot since the parameter server read it.
local version = redis.call('HGET', KEYS[4], 'version')
if version ~= ARGV[2] then
  return redis.error_reply('STALE it has version ' .. (version or 'none'))
end
for i = 4, #ARGV do
  redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[3])
  redis.call('SREM', KEYS[3], ARGV[i])
end
return 1
