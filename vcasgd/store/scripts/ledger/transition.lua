#!lua flags=allow-oom
-- Changes a job's state and fields of its record, if its current state is one of the allowed ones. A
-- job that has ended needs its secrets no more.
-- KEYS  1 record  2 active  3 ended  4 events  5… keys with secrets
-- ARGV  1 job  2 new state, '' for the same  3 '1' for a final state  4 event, as JSON
--       5 number of further fields  6… fields, then the allowed current states
-- Returns {1 or 0, the state before}; {0, ''} if there is no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {0, ''} end
local split = 5 + 2 * tonumber(ARGV[5])
local allowed = false
for i = split + 1, #ARGV do allowed = allowed or ARGV[i] == state end
if not allowed then return {0, state} end
for i = 6, split, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'state', ARGV[2]) end
if ARGV[3] == '1' then
  local now = redis.call('TIME')[1]
  redis.call('SREM', KEYS[2], ARGV[1])
  redis.call('ZADD', KEYS[3], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 86400)
  for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 20000, '*', 'e', ARGV[4])
return {1, state}
