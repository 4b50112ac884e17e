-- Returns the fates of pushed updates.
-- KEYS  1 meta  2 applied  3 pushed  4 rejected
-- ARGV  1 version and token that the worker has, with a space in between, '' if it needs no meta
--       2 name of the chunk that is a whole small snapshot, '' if it needs none
--       then for each update: subtask, its epoch, to, update
-- Returns {version, token of its writer, safe, meta, chunk, status…}; meta is '' unless the worker needs
-- it and has another version, and so is the chunk, which is also '' if it is not here; a status is
-- 'applied', 'pending', 'lost' or 'rejected:<reason>'. Up to the version `safe`, everything is also on the replicas.
-- A 'lost' update is neither in the snapshot nor in the stream: the server came back empty or with
-- an older state, or the update before it was rejected.
-- Includes blocks.lua
-- Includes expect_keys.lua
-- Includes tensors/pushed.lua
-- Limits MAX_NAME_BYTES MAX_ASKED_UPDATES
expect_keys('meta', 'applied', 'pushed', 'rejected')
expect_arguments(2 + 4 * MAX_ASKED_UPDATES, MAX_NAME_BYTES)
local meta = redis.call('GET', KEYS[1])
if not meta then return redis.error_reply('NOSNAPSHOT') end
local finished = tonumber(redis.call('HGET', KEYS[2], 'finished'))
local answer = redis.call('HMGET', KEYS[2], 'version', 'token', 'safe')
local has = answer[1] .. ' ' .. answer[2]
local is_new = ARGV[1] ~= '' and ARGV[1] ~= has
answer[4] = is_new and meta or ''
answer[5] = ''
if is_new and ARGV[2] ~= '' then
  -- The chunks of a version have their own names, so this is that of the meta, or none.
  local chunk = string.sub(KEYS[1], 1, -5) .. 's:' .. answer[1] .. '.' .. answer[2] .. ':' .. ARGV[2]
  answer[5] = redis.call('GET', chunk) or ''
end
for i = 3, #ARGV, 4 do
  local subtask, epoch, to = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local applied = tonumber(redis.call('HGET', KEYS[2], subtask) or 0)
  local block = redis.call('HGET', KEYS[2], 'b' .. block_of(tonumber(subtask)))
  local pushed = last_pushed(KEYS[3], subtask)
  local reason = redis.call('HGET', KEYS[4], ARGV[i + 3])
  local status = 'lost'
  if reason then
    status = 'rejected:' .. reason
  elseif epoch < finished or applied >= to or has_bit(block, tonumber(subtask)) then
    status = 'applied'
  elseif pushed and pushed >= to then
    status = 'pending'
  end
  answer[#answer + 1] = status
end
return answer
