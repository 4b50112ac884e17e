#!lua flags=allow-oom
-- Lets a parameter server take over a shard, and fences older ones.
-- KEYS  1 fence
-- ARGV  1 token
-- Includes fence.lua
local fenced = fenced_by(redis.call('GET', KEYS[1]), ARGV[1])
if fenced then return fenced end
redis.call('SET', KEYS[1], ARGV[1])
return 1
