#!lua flags=allow-oom
-- Publishes a batch: changes parameters, version, rule state and applied record together, and
-- removes the updates of the batch. The chunks of the new snapshot are already written.
-- KEYS  1 fence  2 meta  3 applied  4 pushed  5 tokens  6 updates  7 rejected  8 pins
--       9 push-slots  10 news  11… chunks of the new snapshot, then keys to remove:
--       payloads of the batch, chunks of the version before last
-- ARGV  1 token  2 new meta  3 change, as JSON:
--         base      the version that the change was made from
--         fields    {field: value}     new values of the applied record
--         done      [subtask]          completed subtasks
--         forget    [first, stop]      subtasks [first, stop) of newly finished epochs
--         entries   [entry]            processed stream entries
--         processed [update]           updates whose push slots are released
--         refused   {update: reason}   reported to the workers that sent them
--         reset     {subtask: n}       positions of subtasks whose waiting updates were dropped
--         pin       name or null       name under which this snapshot is pinned
--         pinned    JSON               description stored under this name
--       4 number of chunks
-- Returns 1; 0 if this change was already committed; -1 if a chunk is missing, because of a
-- failover or because the server came back empty.
-- Of a completed subtask, only its bit in the applied record stays, so that nothing here grows with
-- the number of subtasks.
-- Includes blocks.lua
-- Includes fence.lua
if redis.call('EXISTS', KEYS[2]) == 0 then return redis.error_reply('NOSNAPSHOT') end
local fenced = not_held(redis.call('GET', KEYS[1]), ARGV[1])
if fenced then return fenced end
local change = cjson.decode(ARGV[3])
-- The answer to an earlier attempt was lost: only this token can have written this version.
if redis.call('HGET', KEYS[3], 'version') == tostring(change.fields.version) then
  return 0
end
-- A failover may have brought back an older snapshot since the parameter server read it.
local version = tonumber(redis.call('HGET', KEYS[3], 'version'))
if version < change.base then return redis.error_reply('STALE it has version ' .. version) end
if version > change.base then
  return redis.error_reply('FENCED version ' .. version .. ' was not written by this server')
end
local spare = 11 + tonumber(ARGV[4])
for i = 11, spare - 1 do
  if redis.call('EXISTS', KEYS[i]) == 0 then return -1 end
end
redis.call('SET', KEYS[2], ARGV[2])
for field, value in pairs(change.fields) do
  -- Keep all digits of a token; the default conversion would round it.
  redis.call('HSET', KEYS[3], field, string.format('%.0f', value))
end
for subtask, position in pairs(change.reset) do
  redis.call('HSET', KEYS[4], subtask, position .. '|')
end
local blocks = {}
for _, subtask in ipairs(change.done) do
  local field = 'b' .. block_of(subtask)
  local bits = blocks[field] or redis.call('HGET', KEYS[3], field) or ''
  blocks[field] = with_bit(bits, subtask)
  for i = 3, 5 do redis.call('HDEL', KEYS[i], string.format('%.0f', subtask)) end
end
for field, bits in pairs(blocks) do redis.call('HSET', KEYS[3], field, bits) end
local first, stop = change.forget[1], change.forget[2]
if stop > first then
  for block = math.floor(first / BLOCK), math.floor(stop / BLOCK) - 1 do
    redis.call('HDEL', KEYS[3], string.format('b%.0f', block))
  end
  -- The block in which the next epoch starts.
  local field = 'b' .. block_of(stop)
  local bits, kept = redis.call('HGET', KEYS[3], field) or '', ''
  for subtask = stop, stop - stop % BLOCK + 8 * #bits - 1 do
    if has_bit(bits, subtask) then kept = with_bit(kept, subtask) end
  end
  redis.call('HDEL', KEYS[3], field)
  if kept ~= '' then redis.call('HSET', KEYS[3], field, kept) end
end
for _, entry in ipairs(change.entries) do redis.call('XDEL', KEYS[6], entry) end
for _, update in ipairs(change.processed) do redis.call('ZREM', KEYS[9], update) end
for update, reason in pairs(change.refused) do
  redis.call('HSET', KEYS[7], update, reason)
  -- Workers read it within moments. The expiry, which later ones don't put off, bounds its size.
  redis.call('EXPIRE', KEYS[7], 3600, 'NX')
end
if change.pin ~= cjson.null then redis.call('HSET', KEYS[8], change.pin, change.pinned) end
for i = spare, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('XADD', KEYS[10], 'MAXLEN', '1', '*', 'n', '1')
return 1
