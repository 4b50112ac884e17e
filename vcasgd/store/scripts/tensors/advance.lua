#!lua flags=allow-oom
-- Lets workers drop the updates in a version, because the replicas have it.
-- KEYS  1 fence  2 applied  3 news
-- ARGV  1 token  2 version
-- Includes fence.lua
local fenced = not_held(redis.call('GET', KEYS[1]), ARGV[1])
if fenced then return fenced end
local version = redis.call('HGET', KEYS[2], 'version')
if not version then return redis.error_reply('NOSNAPSHOT') end
-- After a failover, the replicas have acknowledged writes of another server.
if tonumber(version) < tonumber(ARGV[2]) then
  return redis.error_reply('STALE it has version ' .. version)
end
redis.call('HSET', KEYS[2], 'safe', ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'n', '1')
return 1
