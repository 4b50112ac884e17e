#!lua flags=allow-oom
-- Takes, renews, or releases the controller's lease.
-- KEYS  1 controller
-- ARGV  1 owner  2 lease in ms; 0 releases the lease
-- Returns the token, or 0 if this controller doesn't hold the lease, and the number of times that
-- the lease was taken and renewed since it was last free or released.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local latest = now + tonumber(ARGV[2])
local held = redis.call('HMGET', KEYS[1], 'owner', 'deadline', 'token', 'renewals')
local token, renewals = tonumber(held[3] or 0), tonumber(held[4] or 0)
local own = held[1] == ARGV[1]
if tonumber(ARGV[2]) == 0 then
  if own then
    redis.call('HDEL', KEYS[1], 'owner', 'renewals')
    redis.call('HSET', KEYS[1], 'deadline', 0)
  end
  return {0, 0}
end
if not own then
  if held[1] and tonumber(held[2]) > now then
    -- The lease can't end later than a new one, unless the clock was set back.
    if tonumber(held[2]) > latest then redis.call('HSET', KEYS[1], 'deadline', latest) end
    return {0, renewals}
  end
  token = token + 1
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'deadline', latest, 'token', token,
  'lease_ms', ARGV[2], 'renewals', renewals + 1)
return {token, renewals + 1}
