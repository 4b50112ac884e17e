-- Takes or renews the controller's lease.
-- KEYS  1 controller
-- ARGV  1 owner  2 lease in ms
-- Returns the token, or 0 if another controller holds the lease.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'owner', 'deadline', 'token')
local token = tonumber(held[3] or 0)
if held[1] ~= ARGV[1] then
  if held[1] and tonumber(held[2]) > now then return 0 end
  token = token + 1
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'deadline', now + tonumber(ARGV[2]), 'token', token)
return token
