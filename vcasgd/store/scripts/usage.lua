-- Returns the size of what workers write, for each key {entries, bytes}; of one with more entries than
-- allowed, the bytes are not measured.
-- KEYS  keys of any type
-- ARGV  1 most entries
local COUNT = {hash = 'HLEN', list = 'LLEN', set = 'SCARD', stream = 'XLEN', zset = 'ZCARD'}
local answer = {}
for i, key in ipairs(KEYS) do
  local count = COUNT[redis.call('TYPE', key).ok]
  local entries, bytes = count and redis.call(count, key) or 1, 0
  -- Exact: a sample could miss a few long entries among many short ones.
  if entries <= tonumber(ARGV[1]) then
    bytes = redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) or 0
  end
  answer[i] = {entries, bytes}
end
return answer
