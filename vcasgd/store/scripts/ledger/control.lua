#!lua flags=allow-oom
-- Takes or renews the controller's lease.
-- KEYS  1 controller
-- ARGV  1 owner  2 lease in ms
-- Returns the token, or 0 if another controller holds the lease.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local latest = now + tonumber(ARGV[2])
local held = redis.call('HMGET', KEYS[1], 'owner', 'deadline', 'token')
local token = tonumber(held[3] or 0)
if held[1] ~= ARGV[1] then
  if held[1] and tonumber(held[2]) > now then
    -- The lease can't end later than a new one, unless the clock was set back.
    if tonumber(held[2]) > latest then redis.call('HSET', KEYS[1], 'deadline', latest) end
    return 0
  end
  token = token + 1
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'deadline', latest, 'token', token,
  'lease_ms', ARGV[2])
return token
