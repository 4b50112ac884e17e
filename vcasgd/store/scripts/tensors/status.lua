-- Returns the fates of pushed updates.
-- KEYS  1 meta  2 applied  3 pushed  4 rejected
-- ARGV  for each update: subtask, its epoch, to, update
-- Returns {version, token of its writer, safe, status…}; a status is 'applied', 'pending', 'lost'
-- or 'rejected:<reason>'. Up to the version `safe`, everything is also on the replicas.
-- A 'lost' update is neither in the snapshot nor in the stream: the server came back empty or with
-- an older state, or the update before it was rejected.
-- Includes blocks.lua
-- Includes expect_keys.lua
expect_keys('meta', 'applied', 'pushed', 'rejected')
if redis.call('EXISTS', KEYS[1]) == 0 then
  return redis.error_reply('NOSNAPSHOT')
end
local finished = tonumber(redis.call('HGET', KEYS[2], 'finished'))
local answer = redis.call('HMGET', KEYS[2], 'version', 'token', 'safe')
for i = 1, #ARGV, 4 do
  local subtask, epoch, to = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local applied = tonumber(redis.call('HGET', KEYS[2], subtask) or 0)
  local block = redis.call('HGET', KEYS[2], 'b' .. block_of(tonumber(subtask)))
  local pushed = redis.call('HGET', KEYS[3], subtask)
  local reason = redis.call('HGET', KEYS[4], ARGV[i + 3])
  local status = 'lost'
  if reason then
    status = 'rejected:' .. reason
  elseif epoch < finished or applied >= to or has_bit(block, tonumber(subtask)) then
    status = 'applied'
  elseif pushed and tonumber(string.match(pushed, '^(%d+)|')) >= to then
    status = 'pending'
  end
  answer[#answer + 1] = status
end
return answer
