-- Books the cost of a machine, if its meter is still at the start of the charge.
-- KEYS  1 meters  2 costs of the job that pays
-- ARGV  1 machine  2 its meter before, '' for none  3 its meter after  4… field, amount, …
-- Returns 1, or 0 if the meter has another value because the charge was already booked.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
for i = 4, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
