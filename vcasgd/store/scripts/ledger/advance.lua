#!lua flags=allow-oom
-- Advances the clocks of jobs with what they pay for their machines, each if its clock is still at
-- the start of the interval. All are one command, so that the server syncs its file once.
-- KEYS  costs of the jobs
-- ARGV  for each job: its clock before ('' for none), its clock after, number of amounts,
--       then field, amount, …
-- Returns, for each job, 1, or 0 if its clock has another value.
local answer, at = {}, 1
for number, costs in ipairs(KEYS) do
  local last = at + 2 + 2 * tonumber(ARGV[at + 2])
  local due = (redis.call('HGET', costs, 'clock') or '') == ARGV[at]
  if due then
    for i = at + 3, last, 2 do redis.call('HINCRBYFLOAT', costs, ARGV[i], ARGV[i + 1]) end
    redis.call('HSET', costs, 'clock', ARGV[at + 1])
  end
  answer[number] = due and 1 or 0
  at = last + 1
end
return answer
