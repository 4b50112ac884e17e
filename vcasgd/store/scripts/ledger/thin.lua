#!lua flags=allow-oom
-- Copies a part of a stream, and then replaces the stream by the copy. Deleting single entries of a
-- stream would free no memory.
-- KEYS  1 stream  2 copy
-- ARGV  1 'copy'     2… IDs of entries, at most some hundred
--       1 'replace'  2 the last ID that the caller knows; all later entries are kept
-- Returns 1, or 0 if there are too many later entries or the stream was deleted meanwhile.
local function copy(entries)
  for _, entry in ipairs(entries) do
    redis.call('XADD', KEYS[2], entry[1], unpack(entry[2]))
  end
end
if ARGV[1] == 'copy' then
  for i = 2, #ARGV do copy(redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])) end
  return 1
end
local later = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 501)
if #later > 500 or redis.call('EXISTS', KEYS[1], KEYS[2]) < 2 then
  redis.call('UNLINK', KEYS[2])
  return 0
end
copy(later)
redis.call('UNLINK', KEYS[1])
redis.call('RENAME', KEYS[2], KEYS[1])
return 1
