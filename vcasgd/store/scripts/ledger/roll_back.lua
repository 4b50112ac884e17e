#!lua flags=allow-oom
-- Records that a running job goes back to an earlier model. Parameter servers follow it.
-- KEYS  1 record  2 tuning  3 events
-- ARGV  1 number of this rollback  2 event, as JSON  3… fields of the tuning, and values as JSON
-- Returns 1; 0 if it is recorded already, or if the job is not running.
if redis.call('HGET', KEYS[1], 'state') ~= 'running' then return 0 end
local number = tonumber(redis.call('HGET', KEYS[2], 'rollbacks') or 0)
if number + 1 ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[2], 'rollbacks', ARGV[1])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 20000, '*', 'e', ARGV[2])
return 1
