-- Takes or renews the push slot for an update's payload.
-- KEYS  1 push-slots  2 window  3 meta
-- ARGV  1 update  2 duration in ms  3… updates that have to be processed before
-- Returns 1, or 0 if all slots are taken or one of the other updates still has its own.
-- Includes expect_keys.lua
-- Limits MAX_NAME_BYTES MAX_EARLIER_UPDATES
expect_keys('push-slots', 'window', 'meta')
expect_arguments(2 + MAX_EARLIER_UPDATES, MAX_NAME_BYTES)
if redis.call('EXISTS', KEYS[3]) == 0 then
  return redis.error_reply('NOSNAPSHOT')
end
for i = 3, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then return 0 end
end
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
local held = redis.call('ZSCORE', KEYS[1], ARGV[1])
-- The default applies until a parameter server sets the number of slots.
local slots = tonumber(redis.call('GET', KEYS[2]) or 64)
if not held and redis.call('ZCARD', KEYS[1]) >= slots then return 0 end
-- An update in the stream keeps its slot until it is processed.
if held ~= 'inf' then redis.call('ZADD', KEYS[1], until_ms, ARGV[1]) end
return 1
