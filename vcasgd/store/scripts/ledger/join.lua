-- Adds a machine that joins, unless its token has enough of them.
-- KEYS  1 machines that joined  2 their reports
-- ARGV  1 machine  2 its properties, as JSON  3 name of its token
--       4 most machines of the token  5 most machines of all tokens
--       6 seconds after which a machine without a report is lost
--       7 digest of the machine's secret
-- Returns 'joined', 'limit', 'full', or 'taken'. A machine that this call added before counts as
-- joined; one with other properties is replaced if it has the same secret or is lost.
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return 'joined' end
local now = redis.call('TIME')
now = tonumber(now[1]) + tonumber(now[2]) / 1e6
local all, own = 0, 0
local reports = redis.call('HGETALL', KEYS[2])
for i = 1, #reports, 2 do
  local machine = redis.call('HGET', KEYS[1], reports[i])
  local lost = now - cjson.decode(reports[i + 1]).at >= tonumber(ARGV[6])
  if machine and not lost and reports[i] == ARGV[1] then
    if cjson.decode(machine).secret ~= ARGV[7] then return 'taken' end
  elseif machine and not lost then
    all = all + 1
    if cjson.decode(machine).token == ARGV[3] then own = own + 1 end
  end
end
if own >= tonumber(ARGV[4]) then return 'limit' end
if all >= tonumber(ARGV[5]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], cjson.encode({at = now}))
return 'joined'
