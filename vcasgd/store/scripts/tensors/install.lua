-- Makes a snapshot the present one if there is none: the first snapshot, one from the memory of a
-- parameter server, or one from a checkpoint.
-- KEYS  1 fence  2 meta  3 applied  4 pushed  5 tokens  6 updates  7 rejected
--       8 push-slots  9 news  10… its chunks, already written
-- ARGV  1 token (0: a worker's first snapshot)  2 meta  3… applied record, field and value
-- Returns 1; 0 if there is a snapshot already; -1 if a chunk is missing, because the server came
-- back empty meanwhile.
-- Includes expect_keys.lua
-- Includes fence.lua
-- Limits MAX_CHUNKS MAX_STRING_BYTES
expect_keys('fence', 'meta', 'applied', 'pushed', 'tokens', 'updates', 'rejected', 'push-slots',
  'news')
expect_arguments(MAX_CHUNKS, MAX_STRING_BYTES)
if #KEYS > 9 + MAX_CHUNKS then error('at most ' .. MAX_CHUNKS .. ' chunks are allowed') end
local token = tonumber(ARGV[1])
local fenced = token > 0 and fenced_by(redis.call('GET', KEYS[1]), token)
if fenced then return fenced end
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
for i = 10, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return -1 end
end
if token > 0 then redis.call('SET', KEYS[1], ARGV[1]) end
-- A worker may have made them large.
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
redis.call('SET', KEYS[2], ARGV[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[9], 'MAXLEN', '1', '*', 'n', '1')
return 1
