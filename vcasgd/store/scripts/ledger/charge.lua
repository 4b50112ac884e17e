-- Books what a machine has cost, if its meter still stands where the charge begins.
-- KEYS  1 meters  2 costs of the job that pays
-- ARGV  1 machine  2 its meter before, '' for none  3 its meter after  4… field, amount, …
-- Returns 1, or 0 where somebody has booked it.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
for i = 4, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
