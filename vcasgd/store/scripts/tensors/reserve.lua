-- Takes a place for an update's payload, or keeps it for longer.
-- KEYS  1 places  2 window  3 meta
-- ARGV  1 update  2 for how many ms
-- Returns 1, or 0 where every place is taken.
if redis.call('EXISTS', KEYS[3]) == 0 then
  return redis.error_reply('NOSNAPSHOT')
end
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
local held = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not held then
  -- no parameter server has said yet how many there are
  local window = tonumber(redis.call('GET', KEYS[2]) or 64)
  if redis.call('ZCARD', KEYS[1]) >= window then return 0 end
end
-- what waits in the stream keeps its place until it is dealt with
if held ~= 'inf' then redis.call('ZADD', KEYS[1], until_ms, ARGV[1]) end
return 1
