-- A worker's heartbeat: it is alive, and goes on with what it holds.
-- KEYS  1 record  2 leases  3 holders  4 workers  5 draining  6 quarantine
-- ARGV  1 worker  2 lease in ms  3 heartbeat, as JSON  4… piece, token, piece, token, …
-- Returns {state, leave, lost piece…}: `leave` is 'drain', 'quarantine' or ''.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = redis.call('HGET', KEYS[1], 'state') or 'gone'
if state ~= 'gone' then redis.call('HSET', KEYS[4], ARGV[1], ARGV[3]) end
local leave = ''
if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then leave = 'drain' end
if redis.call('HEXISTS', KEYS[6], ARGV[1]) == 1 then leave = 'quarantine' end
local answer = {state, leave}
for i = 4, #ARGV, 2 do
  if redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[1] .. '|' .. ARGV[i + 1] then
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
