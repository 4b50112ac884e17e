-- Deletes a stream whose last ID is later than a time. A worker can choose the ID of a line, and no
-- line can follow the largest one.
-- KEYS  1 stream
-- ARGV  1 Unix time in ms
-- Returns 1 if it was deleted.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then
    local at = tonumber(string.match(info[i + 1], '^%d+'))
    return at > tonumber(ARGV[1]) and redis.call('UNLINK', KEYS[1]) or 0
  end
end
return 0
