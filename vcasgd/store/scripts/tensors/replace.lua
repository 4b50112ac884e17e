#!lua flags=allow-oom
-- Replaces an older snapshot with that of a parameter server: after a failover, the tensors server
-- may be a replica without the newest writes. Updates that wait stay; those that the snapshot
-- already contains are recognized by their positions.
-- KEYS  1 fence  2 meta  3 applied  4 pushed  5 tokens  6 news
--       7… its chunks, already written
-- ARGV  1 token  2 version  3 meta  4 first subtask of the first unfinished epoch
--       5… applied record, field and value
-- Returns 1; 0 if the present snapshot is not older; -1 if a chunk is missing.
-- Includes blocks.lua
-- Includes fence.lua
local fenced = fenced_by(redis.call('GET', KEYS[1]), ARGV[1])
if fenced then return fenced end
local version = redis.call('HGET', KEYS[3], 'version')
if not version then return redis.error_reply('NOSNAPSHOT') end
if tonumber(version) >= tonumber(ARGV[2]) then return 0 end
for i = 7, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return -1 end
end
-- The replica may not have the takeover either.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[3])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
for _, key in ipairs({KEYS[4], KEYS[5]}) do
  for _, subtask in ipairs(redis.call('HKEYS', key)) do
    local number = tonumber(subtask) or -1
    if number < tonumber(ARGV[4])
      or has_bit(redis.call('HGET', KEYS[3], 'b' .. block_of(number)), number) then
      redis.call('HDEL', key, subtask)
    end
  end
end
redis.call('XADD', KEYS[6], 'MAXLEN', '1', '*', 'n', '1')
return 1
