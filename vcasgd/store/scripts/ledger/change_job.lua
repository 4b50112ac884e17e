-- Sets fields of a job's record, unless the job has ended.
-- KEYS  1 record  2 active  3 events
-- ARGV  1 job  2 event, as JSON  3… fields and their values
-- Returns {1, state}, or {0, state} if it has ended; {0, ''} if there is no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {0, ''} end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return {0, state} end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 20000, '*', 'e', ARGV[2])
return {1, state}
