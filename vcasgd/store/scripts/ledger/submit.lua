-- Creates a job, once per idempotency key.
-- KEYS  1 idempotency key (not used if ARGV 3 is '0')  2 jobs  3 active  4 record  5 work
--       6 open  7 events  8 secrets
-- ARGV  1 job  2 digest of the request  3 lifetime of the key in seconds ('0': no key)
--       4 event, as JSON  5 share of the server's memory limit that must not be exceeded
--       6 encrypted secrets ('': none)  7 number of work fields  8… work fields, then record fields
-- Returns {job, digest of the request that created it}. Fails near the memory limit: the rest is for
-- the jobs that run.
if ARGV[3] ~= '0' then
  local known = redis.call('GET', KEYS[1])
  if known then
    local job, digest = string.match(known, '^([^|]*)|(.*)$')
    -- a job that was deleted meanwhile can be submitted again
    if redis.call('ZSCORE', KEYS[2], job) then return {job, digest} end
  end
end
local memory = redis.call('INFO', 'memory')
local limit = tonumber(string.match(memory, '\nmaxmemory:(%d+)'))
if limit > 0 and tonumber(string.match(memory, '\nused_memory:(%d+)')) > tonumber(ARGV[5]) * limit then
  return redis.error_reply('FULL the server is near its memory limit')
end
if ARGV[3] ~= '0' then
  redis.call('SET', KEYS[1], ARGV[1] .. '|' .. ARGV[2], 'EX', ARGV[3])
end
local time = redis.call('TIME')
-- in microseconds, assembled as text, because a Lua number would be rounded
redis.call('ZADD', KEYS[2], time[1] .. string.format('%06d', time[2]), ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
local split = 7 + 2 * tonumber(ARGV[7])
for i = 8, split, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
for i = split + 1, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
if ARGV[6] ~= '' then redis.call('SET', KEYS[8], ARGV[6]) end
redis.call('ZADD', KEYS[6], -2, 'initialise:0')
redis.call('XADD', KEYS[7], '*', 'e', ARGV[4])
return {ARGV[1], ARGV[2]}
