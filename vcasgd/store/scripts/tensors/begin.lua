-- Returns the sample to train a subtask from, and invalidates older leases of the subtask.
-- KEYS  1 meta  2 applied  3 pushed  4 tokens
-- ARGV  1 subtask  2 its epoch  3 its size  4 lease token
-- The position includes updates that are applied and updates that wait in the stream.
-- Includes blocks.lua
-- Includes expect_keys.lua
-- Includes tensors/pushed.lua
-- Limits MAX_NAME_BYTES
expect_keys('meta', 'applied', 'pushed', 'tokens')
expect_arguments(4, MAX_NAME_BYTES)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return redis.error_reply('NOSNAPSHOT')
end
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', KEYS[2], 'finished')) then
  return tonumber(ARGV[3])
end
local subtask = tonumber(ARGV[1])
if has_bit(redis.call('HGET', KEYS[2], 'b' .. block_of(subtask)), subtask) then
  return tonumber(ARGV[3])
end
local seen = newest_token(KEYS[4], ARGV[1])
if seen > tonumber(ARGV[4]) then
  return redis.error_reply('FENCED subtask ' .. ARGV[1] .. ' has a newer lease')
end
redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
local applied = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
return math.max(applied, (last_pushed(KEYS[3], ARGV[1])) or 0)
