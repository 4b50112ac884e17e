#!lua flags=allow-oom
-- Stores a part of a shard's applied record, before reconcile.lua.
-- KEYS  1 work  2 shards  3 blocks
-- ARGV  1 shard  2 server token  3… block and its bitmap, block, bitmap, …
-- Returns 1; 0 if the job was deleted.
-- Includes fence.lua
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local shard = ARGV[1]
local fenced = fenced_by(redis.call('HGET', KEYS[2], shard .. ':token'), ARGV[2])
if fenced then return fenced end
-- From now on, an older server reports nothing that this record may lack.
redis.call('HSET', KEYS[2], shard .. ':token', ARGV[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], shard .. ':' .. ARGV[i], ARGV[i + 1]) end
return 1
