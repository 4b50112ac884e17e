#!lua flags=allow-oom
-- Reports the work that a parameter server applied to its shard. Idempotent.
-- KEYS, ARGV 1…8  those of reports.lua
-- ARGV  9… done subtasks, a bounded number
-- Returns 1, or 0 if the ledger already has a newer report.
-- Every finished epoch is evaluated, or else the newest point: others between two reports are not.
-- Includes ledger/reports.lua
local work = redis.call('HMGET', KEYS[1], 'per_epoch', 'finished', 'points')
if not work[2] then return 0 end
-- missing until the controller starts the job; nothing is applied before
local per_epoch = tonumber(work[1]) or 0
local known = redis.call('HMGET', KEYS[6], of('token'), of('version'), of('cleared'))
local fenced = fenced_by(known[1], ARGV[3])
if fenced then return fenced end
if tonumber(known[1] or 0) == tonumber(ARGV[3]) and tonumber(known[2] or -1) > tonumber(ARGV[4]) then return 0 end

-- Blocks of finished epochs, a bounded number; the others follow with the next reports.
local cleared = tonumber(known[3] or 0)
local last = math.min(math.floor(finished * per_epoch / BLOCK), cleared + 1000)
for block = cleared, last - 1 do
  redis.call('HDEL', KEYS[7], of(string.format('%.0f', block)))
end
local all, _, point = store_report(math.max(cleared, last))

local record = applied_record(KEYS[7], KEYS[6], shards, per_epoch)
for i = 9, #ARGV do
  local subtask = tonumber(ARGV[i])
  if subtask >= finished * per_epoch then record.add(shard, subtask) end
  if record.has(subtask) then
    local piece = 'train:' .. ARGV[i]
    redis.call('ZREM', KEYS[2], piece)
    redis.call('HDEL', KEYS[3], piece)
    redis.call('ZREM', KEYS[4], piece)
    redis.call('HDEL', KEYS[8], 'again:' .. ARGV[i])
  end
end
open_evaluations(work[3] == 'samples', tonumber(work[2]) + 1, all, point)
return 1
