#!lua flags=allow-oom
-- Deletes a job that has ended.
-- KEYS  1 jobs  2 active  3 deleted  4… all keys of the job
-- ARGV  1 job
-- Returns 'deleted', 'active' (nothing is deleted), or 'unknown'.
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 'unknown' end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 'active' end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[3], redis.call('TIME')[1], ARGV[1])
for i = 4, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'deleted'
