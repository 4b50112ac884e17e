#!lua flags=allow-oom
-- Releases expired push slots, and deletes their payloads.
-- KEYS  1 push-slots  2 updates  3… payload chunks, the same number for each update
-- ARGV  1 chunks of one update  2 duration of a slot in ms  3… updates
-- Returns the number of released slots.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local chunks, reaped = tonumber(ARGV[1]), 0
-- No slot is reserved for longer than a new one, unless the clock was set back.
local latest = now + tonumber(ARGV[2])
local later = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. latest, '(+inf', 'LIMIT', 0, 100)
for _, update in ipairs(later) do redis.call('ZADD', KEYS[1], latest, update) end
for i = 3, #ARGV do
  local until_ms = redis.call('ZSCORE', KEYS[1], ARGV[i])
  -- It may have been renewed since the parameter server read it.
  if until_ms and tonumber(until_ms) <= now then
    redis.call('ZREM', KEYS[1], ARGV[i])
    for j = 1, chunks do redis.call('UNLINK', KEYS[2 + (i - 3) * chunks + j]) end
    reaped = reaped + 1
  end
end
-- Slots of waiting updates without an entry in the stream: only a broken worker causes them.
if redis.call('XLEN', KEYS[2]) == 0 then
  reaped = reaped + redis.call('ZREMRANGEBYSCORE', KEYS[1], '+inf', '+inf')
end
return reaped
