-- Adds an update to the stream if it starts at the position of its subtask.
-- KEYS  1 meta  2 applied  3 pushed  4 tokens  5 updates  6 push-slots
--       7… payload chunks, already written
-- ARGV  1 subtask  2 its epoch  3 from  4 to  5 lease token  6 update  7 header
-- Returns {'accepted', to}; {'refused', position} if it starts elsewhere, -1 if the whole subtask
-- is applied; {'incomplete', n} if only n chunks exist or its push slot was released, because the
-- server came back empty or the worker was silent for too long.
-- Pushing the same update again is harmless: it is recognized and accepted without effect.
-- Includes blocks.lua
-- Includes expect_keys.lua
-- Includes tensors/pushed.lua
-- Limits MAX_CHUNKS MAX_HEADER_BYTES
expect_keys('meta', 'applied', 'pushed', 'tokens', 'updates', 'push-slots')
expect_arguments(7, MAX_HEADER_BYTES)
if #KEYS > 6 + MAX_CHUNKS then error('at most ' .. MAX_CHUNKS .. ' chunks are allowed') end
local chunks = {}
for i = 7, #KEYS do chunks[#chunks + 1] = KEYS[i] end
local function each_chunk(command)
  for _, key in ipairs(chunks) do redis.call(command, key) end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  -- No server reads the payload before the update is pushed again.
  each_chunk('UNLINK')
  redis.call('ZREM', KEYS[6], ARGV[6])
  return redis.error_reply('NOSNAPSHOT')
end
local function refuse(position)
  -- An earlier attempt whose answer was lost may wait in the stream, and needs its payload.
  if redis.call('ZSCORE', KEYS[6], ARGV[6]) == 'inf' then
    each_chunk('PERSIST')
  else
    each_chunk('UNLINK')
    redis.call('ZREM', KEYS[6], ARGV[6])
  end
  return {'refused', position}
end

local seen = newest_token(KEYS[4], ARGV[1])
if seen > tonumber(ARGV[5]) then
  refuse()
  return redis.error_reply('FENCED subtask ' .. ARGV[1] .. ' has a newer lease')
end
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', KEYS[2], 'finished')) then
  return refuse(-1)
end
local subtask = tonumber(ARGV[1])
if has_bit(redis.call('HGET', KEYS[2], 'b' .. block_of(subtask)), subtask) then
  return refuse(-1)
end
local position = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
local to, last = last_pushed(KEYS[3], ARGV[1])
if to then
  if last == ARGV[6] then
    -- An applied update no longer needs its payload; a waiting one does.
    if position >= to then
      each_chunk('UNLINK')
      redis.call('ZREM', KEYS[6], ARGV[6])
    else
      each_chunk('PERSIST')
    end
    return {'accepted', to}
  end
  position = math.max(position, to)
end
if position ~= tonumber(ARGV[3]) then return refuse(position) end

-- One call for each chunk, because Lua can't unpack thousands of names into a single one.
local here = 0
for _, key in ipairs(chunks) do here = here + redis.call('EXISTS', key) end
if here < #chunks or not redis.call('ZSCORE', KEYS[6], ARGV[6]) then
  -- A small payload comes together with the request for its slot, and has no room without one.
  each_chunk('UNLINK')
  return {'incomplete', here}
end
redis.call('HSET', KEYS[4], ARGV[1], ARGV[5])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4] .. '|' .. ARGV[6])
-- The parameter server may be unavailable for longer than the expiry of a payload without entry.
each_chunk('PERSIST')
redis.call('ZADD', KEYS[6], 'inf', ARGV[6])
redis.call('XADD', KEYS[5], '*', 'h', ARGV[7])
return {'accepted', tonumber(ARGV[4])}
