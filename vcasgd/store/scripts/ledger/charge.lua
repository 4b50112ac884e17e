#!lua flags=allow-oom
-- Books the costs of machines, each if its meter and the clock of its job are still at the start of
-- the charge. All are one command, so that the server syncs its file once.
-- KEYS  1 meters  2… costs of the jobs that pay
-- ARGV  for each machine: machine, its meter before ('' for none), its meter after,
--       number of the key of its costs, their clock ('' for none), number of amounts,
--       then field, amount, …
-- Returns, for each machine, 1, or 0 if the meter or the clock has another value because the charge
-- was already booked.
local answer, at = {}, 1
while at <= #ARGV do
  local machine, before, after = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local costs, last = KEYS[tonumber(ARGV[at + 3])], at + 5 + 2 * tonumber(ARGV[at + 5])
  local due = (redis.call('HGET', KEYS[1], machine) or '') == before
    and (redis.call('HGET', costs, 'clock') or '') == ARGV[at + 4]
  if due then
    for i = at + 6, last, 2 do redis.call('HINCRBYFLOAT', costs, ARGV[i], ARGV[i + 1]) end
    redis.call('HSET', KEYS[1], machine, after)
  end
  answer[#answer + 1] = due and 1 or 0
  at = last + 1
end
return answer
