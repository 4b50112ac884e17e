#!lua flags=allow-oom
-- Makes the ledger agree with the applied record of a shard's snapshot, after a parameter server
-- took over or went back to an older snapshot. store_record.lua has stored the record's blocks.
-- KEYS, ARGV 1…8  those of reports.lua
-- ARGV  9 '1' if the first snapshot must be created again  10… blocks of the record
-- Returns 1; 0 if the job was deleted.
-- Subtasks that are no longer done are not opened one by one: leasing starts again with the first
-- unfinished epoch, and skips what is done or leased.
-- Includes ledger/reports.lua
-- Includes ledger/work_items.lua
-- Limits MAX_ENTRIES
local work = redis.call('HMGET', KEYS[1], 'per_epoch', 'total', 'finished', 'points')
if not work[3] then return 0 end
-- missing until the controller starts the job; nothing is applied before
local per_epoch, total = tonumber(work[1]) or 0, tonumber(work[2]) or 0
local fenced = fenced_by(redis.call('HGET', KEYS[6], of('token')), ARGV[3])
if fenced then return fenced end
local all, samples, point = store_report(math.floor(finished * per_epoch / BLOCK))

-- There are a few hundred blocks of a shard, those of the present epochs.
local kept = {}
for i = 10, #ARGV do kept[of(ARGV[i])] = true end
for _, field in ipairs(redis.call('HKEYS', KEYS[7])) do
  if string.match(field, '^(%d+):') == shard and not kept[field] then
    redis.call('HDEL', KEYS[7], field)
  end
end

-- a worker can write any number
local next = math.min(counter(KEYS[8], 'next'), total)
local highest = math.max(next, counter(KEYS[8], 'highest'))
redis.call('HSET', KEYS[8], 'next', math.min(next, all * per_epoch),
  'highest', math.min(highest, total))

-- evaluations are numbered by epochs or by samples
local by_samples = work[4] == 'samples'
local last = by_samples and samples or all
local record = applied_record(KEYS[7], KEYS[6], shards, per_epoch)
local function is_over(piece)
  local kind, number = parts_of(piece)
  number = tonumber(number)
  return (kind == 'train' and record.has(number)) or (kind == 'evaluate' and number > last)
end
-- One for each worker; acquire.lua drops other work items that are done.
for place = math.min(redis.call('ZCARD', KEYS[2]), MAX_ENTRIES) - 1, 0, -1 do
  local piece = item_at(KEYS[2], place)
  if piece and is_over(piece) then
    redis.call('ZREM', KEYS[2], piece)
    redis.call('HDEL', KEYS[3], piece)
  end
end
for place = math.min(redis.call('ZCOUNT', KEYS[4], '-inf', -1), MAX_ENTRIES) - 1, 0, -1 do
  local piece = item_at(KEYS[4], place)
  if piece and is_over(piece) then redis.call('ZREM', KEYS[4], piece) end
end
-- drop results of evaluations that are no longer in the model
for _, number in ipairs(redis.call('HKEYS', KEYS[5])) do
  if tonumber(number) > last then redis.call('HDEL', KEYS[5], number) end
end
open_evaluations(by_samples, 1, all, point)
if ARGV[9] == '1' and not redis.call('ZSCORE', KEYS[2], 'initialise:0') then
  redis.call('ZADD', KEYS[4], -2, 'initialise:0')
end
return 1
