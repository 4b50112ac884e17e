-- Leases one work item to a worker.
-- KEYS  1 record  2 work  3 leases  4 holders  5 open  6 quarantine  7 done  8 counters
--       9 placed  10 clearances  11 refused  12 events
-- ARGV  1 worker  2 lease in ms  3 kind of work item, '' for any  4 the worker's pass
-- Includes ledger/clearance.lua
-- Returns {kind, number, token, deadline} or {'wait', reason}.
-- Work items are named kind:number. Order: items that lost their holder, with the first snapshot
-- and evaluations before subtasks; then the next subtask, at most `lead` epochs ahead of the
-- slowest unfinished one.
-- Includes expect_keys.lua
expect_keys('record', 'work', 'leases', 'holders', 'open', 'quarantine', 'done', 'counters',
  'placed', 'clearances', 'refused', 'events')
if redis.call('HEXISTS', KEYS[6], ARGV[1]) == 1 then return {'wait', 'quarantined'} end
local missing = clearance_missing(KEYS[1], KEYS[9], KEYS[10], ARGV[1], ARGV[4])
if missing then
  say_refused(KEYS[11], KEYS[12], ARGV[1], missing)
  return {'wait', 'not cleared: ' .. missing}
end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'wait', 'gone'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- No lease can end later than one that is granted now, unless the clock was set back.
local latest = now + tonumber(ARGV[2])
for _, piece in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. latest, '+inf', 'LIMIT', 0, 100)) do
  redis.call('ZADD', KEYS[3], latest, piece)
end
for _, piece in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  local kind, number = string.match(piece, '^(%a+):(%d+)$')
  redis.call('ZREM', KEYS[3], piece)
  redis.call('HDEL', KEYS[4], piece)
  redis.call('HINCRBY', KEYS[8], 'expired', 1)
  redis.call('ZADD', KEYS[5], kind == 'train' and number or -1, piece)
end

local function grant(piece, again)
  local kind, number = string.match(piece, '^(%a+):(%d+)$')
  if again and kind == 'train' then redis.call('HSET', KEYS[8], 'again:' .. number, 1) end
  local token = redis.call('HINCRBY', KEYS[8], 'tokens', 1)
  redis.call('ZADD', KEYS[3], latest, piece)
  redis.call('HSET', KEYS[4], piece, ARGV[1] .. '|' .. token)
  return {kind, tonumber(number), token, latest}
end

-- a starting job leases only its first snapshot, a finishing one only evaluations
local may_train = state == 'running'
if state ~= 'running' and state ~= 'starting' and state ~= 'finishing' then
  return {'wait', state}
end
local lowest = redis.call('ZRANGE', KEYS[5], 0, 0)[1]
local kind = lowest and string.match(lowest, '^(%a+):')
if lowest and (may_train or kind ~= 'train') and (ARGV[3] == '' or kind == ARGV[3]) then
  redis.call('ZREM', KEYS[5], lowest)
  return grant(lowest, true)
end
if ARGV[3] ~= '' then return {'wait', 'no ' .. ARGV[3]} end
if not may_train then return {'wait', state} end

local work = redis.call('HMGET', KEYS[2], 'total', 'per_epoch', 'finished', 'lead')
local total, per_epoch, finished = tonumber(work[1]), tonumber(work[2]), tonumber(work[3])
local next = tonumber(redis.call('HGET', KEYS[8], 'next') or 0)
-- work applied without a lease is done anyway
next = math.max(next, finished * per_epoch)
local last = next + 1000
while next < last and redis.call('SISMEMBER', KEYS[7], next) == 1 do next = next + 1 end
if next == last then
  -- a worker can write `next`, so the loop is bounded; the next call continues it
  redis.call('HSET', KEYS[8], 'next', next)
  return {'wait', 'skipping applied work'}
end
if next >= total then return {'wait', 'nothing left to lease'} end
if math.floor(next / per_epoch) > finished + tonumber(work[4]) then
  return {'wait', 'epoch lead'}
end
redis.call('HSET', KEYS[8], 'next', next + 1)
return grant('train:' .. next)
