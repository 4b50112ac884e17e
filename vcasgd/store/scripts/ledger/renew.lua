#!lua flags=allow-oom
-- Stores a worker's heartbeat and renews its leases.
-- KEYS  1 record  2 leases  3 holders  4 workers  5 draining  6 quarantine
--       7 placed  8 clearances  9 refused  10 open
-- ARGV  1 worker  2 lease in ms  3 heartbeat, as JSON  4 the worker's pass
--       5… work item, token, work item, token, …
-- Returns {state, leave, lost work item…}.
-- `leave` is 'drain', 'quarantine', 'not cleared: …', or ''.
-- A worker that is no longer cleared loses all its leases; others can take them at once.
-- Includes ledger/clearance.lua
-- Includes expect_keys.lua
-- Includes ledger/work_items.lua
-- Limits MAX_HEARTBEAT_BYTES MAX_RENEWED
expect_keys('record', 'leases', 'holders', 'workers', 'draining', 'quarantine', 'placed',
  'clearances', 'refused', 'open')
expect_arguments(4 + 2 * MAX_RENEWED, MAX_HEARTBEAT_BYTES)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = redis.call('HGET', KEYS[1], 'state') or 'gone'
if state ~= 'gone' then redis.call('HSET', KEYS[4], ARGV[1], ARGV[3]) end
local leave = ''
if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then leave = 'drain' end
if redis.call('HEXISTS', KEYS[6], ARGV[1]) == 1 then leave = 'quarantine' end
local missing, itself = clearance_missing(KEYS[1], KEYS[7], KEYS[8], ARGV[1], ARGV[4])
if missing then
  leave = 'not cleared: ' .. missing
  redis.call('HSET', KEYS[9], ARGV[1], missing)
end
local answer = {state, leave}
for i = 5, #ARGV, 2 do
  local piece = ARGV[i]
  local own = holder_of(KEYS[3], piece) == ARGV[1] .. '|' .. ARGV[i + 1]
  if own and not missing then
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), piece)
  else
    answer[#answer + 1] = piece
  end
  if own and missing and itself then free(KEYS[2], KEYS[3], KEYS[10], piece) end
end
return answer
