#!lua flags=allow-oom
-- Books costs, each if its meter and the clock of its job are still at the start of the charge. All
-- are one command, so that the server syncs its file once.
-- KEYS  1 USD by month and user; then meters of machines, costs and records of the jobs that pay
-- ARGV  1 month; then for each charge: number of the key of its meter, the meter's field, its value before ('' for
--       none), its value after, number of the key of the costs, their clock ('' for none), number of
--       the key of the job's record (0 for none), number of amounts, then field, amount, …
-- Returns, for each charge, 1, or 0 if the meter or the clock has another value because it was booked
-- already.
local answer, at = {}, 2
while at <= #ARGV do
  local meters, field = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  local costs, last = KEYS[tonumber(ARGV[at + 4])], at + 7 + 2 * tonumber(ARGV[at + 7])
  local due = (redis.call('HGET', meters, field) or '') == ARGV[at + 2]
    and (redis.call('HGET', costs, 'clock') or '') == ARGV[at + 5]
  if due then
    for i = at + 8, last, 2 do
      redis.call('HINCRBYFLOAT', costs, ARGV[i], ARGV[i + 1])
      if ARGV[i]:match('|usd$') then
        local user = redis.call('HGET', KEYS[tonumber(ARGV[at + 6])], 'owner') or ''
        redis.call('HINCRBYFLOAT', KEYS[1], ARGV[1] .. '|' .. user, ARGV[i + 1])
      end
    end
    redis.call('HSET', meters, field, ARGV[at + 3])
  end
  answer[#answer + 1] = due and 1 or 0
  at = last + 1
end
return answer
