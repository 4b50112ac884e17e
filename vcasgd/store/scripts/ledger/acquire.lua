#!lua flags=allow-oom
-- Leases one work item to a worker.
-- KEYS  1 record  2 work  3 leases  4 holders  5 open  6 quarantine  7 blocks  8 counters
--       9 placed  10 clearances  11 refused  12 shards
-- ARGV  1 worker  2 lease in ms  3 kind of work item, '' for any  4 the worker's pass
--       5 take over a subtask that was leased before this token if there is nothing else to do
-- Includes ledger/clearance.lua
-- Includes ledger/applied.lua
-- Returns {kind, number, token, deadline} or {'wait', reason}.
-- Work items are named kind:number. Order: items that lost their holder, with the first snapshot
-- and evaluations before subtasks; then the next subtask, at most `lead` epochs ahead of the
-- slowest unfinished one; else the oldest lease of another worker. If at most some number of workers
-- may train at a time, others get no subtask while so many hold one.
-- Includes expect_keys.lua
-- Includes ledger/work_items.lua
-- Limits MAX_NAME_BYTES
expect_keys('record', 'work', 'leases', 'holders', 'open', 'quarantine', 'blocks', 'counters',
  'placed', 'clearances', 'refused', 'shards')
expect_arguments(5, MAX_NAME_BYTES)
if redis.call('HEXISTS', KEYS[6], ARGV[1]) == 1 then return {'wait', 'quarantined'} end
local missing = clearance_missing(KEYS[1], KEYS[9], KEYS[10], ARGV[1], ARGV[4])
if missing then
  redis.call('HSET', KEYS[11], ARGV[1], missing)
  return {'wait', 'not cleared: ' .. missing}
end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'wait', 'gone'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- No lease can end later than one that is granted now, unless the clock was set back.
local latest = now + tonumber(ARGV[2])
for _ = 1, 100 do
  local piece, ends = item_at(KEYS[3], -1)
  if not piece or ends <= latest then break end
  redis.call('ZADD', KEYS[3], latest, piece)
end
for _ = 1, 100 do
  local piece, ends = item_at(KEYS[3], 0)
  if not piece or ends > now then break end
  redis.call('HINCRBY', KEYS[8], 'expired', 1)
  free(KEYS[3], KEYS[4], KEYS[5], piece)
end

local function grant(piece, again)
  local kind, number = parts_of(piece)
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
local work = redis.call('HMGET', KEYS[2], 'total', 'per_epoch', 'finished', 'lead', 'shards',
  'most_workers')
local total, per_epoch, finished = tonumber(work[1]), tonumber(work[2]), tonumber(work[3])
local record = applied_record(KEYS[7], KEYS[12], tonumber(work[5] or 1), per_epoch or 0)

-- Whether this worker may train. A worker has a few leases at a time.
local function may_join()
  local most, others, count = tonumber(work[6] or 0), {}, 0
  if most == 0 then return true end
  for place = 0, math.min(8 * most, 10000) do
    local piece = item_at(KEYS[3], place)
    if not piece then break end
    local holder = string.match(holder_of(KEYS[4], piece) or '', '^(.*)|%d+$')
    if holder and string.find(piece, '^train:%d+$') then
      if holder == ARGV[1] then return true end
      if not others[holder] then others[holder], count = true, count + 1 end
    end
  end
  return count < most
end
if may_train and ARGV[3] ~= 'evaluate' and ARGV[3] ~= 'initialise' and not may_join() then
  may_train = false
  state = 'others train the whole batch'
end

local lowest, kind
for _ = 1, 100 do
  lowest = item_at(KEYS[5], 0)
  kind = lowest and string.match(lowest, '^(%a+):')
  if kind ~= 'train' or not record.has(tonumber(string.match(lowest, ':(%d+)$'))) then break end
  -- Applied under another lease.
  redis.call('ZREM', KEYS[5], lowest)
  lowest = nil
end
if lowest and (may_train or kind ~= 'train') and (ARGV[3] == '' or kind == ARGV[3]) then
  redis.call('ZREM', KEYS[5], lowest)
  return grant(lowest, true)
end
if ARGV[3] ~= '' then return {'wait', 'no ' .. ARGV[3]} end
if not may_train then return {'wait', state} end

local first = counter(KEYS[8], 'next')
local highest = math.max(first, counter(KEYS[8], 'highest'))
local stop = math.min(total, (finished + tonumber(work[4]) + 1) * per_epoch)
local next, steps = math.max(first, finished * per_epoch), 0
-- After a shard went back, subtasks before `highest` can be done or leased. The loop is bounded,
-- because a worker can write `next`; the next call continues it.
while next < stop and steps < 500 do
  local found = record.next_open(next)
  if found == next then
    if not redis.call('ZSCORE', KEYS[3], 'train:' .. next) then break end
    found = next + 1
  end
  next, steps = found, steps + 1
end
if next >= stop then
  next = math.max(first, stop)
elseif steps < 500 then
  redis.call('HSET', KEYS[8], 'next', next + 1, 'highest', math.max(highest, next + 1))
  return grant('train:' .. next, next < highest)
end
if next > first then redis.call('HSET', KEYS[8], 'next', next) end
if next < stop then return {'wait', 'skipping applied work'} end

-- Of the leases that were not renewed for longest, one of a lost or frozen worker is the first; the
-- others change with every heartbeat, so that all have their turn.
local oldest, least = nil, tonumber(ARGV[5])
for place = 0, 31 do
  local piece = item_at(KEYS[3], place)
  if not piece then break end
  local holder, token = string.match(holder_of(KEYS[4], piece) or '', '^(.*)|(%d+)$')
  if holder and holder ~= ARGV[1] and string.find(piece, '^train:%d+$') and tonumber(token) < least then
    oldest, least = piece, tonumber(token)
  end
end
if oldest then
  redis.call('HINCRBY', KEYS[8], 'overtaken', 1)
  return grant(oldest, true)
end
return {'wait', stop == total and 'nothing left to lease' or 'epoch lead'}
