-- Sets or removes the nickname of a contributor.
-- KEYS  1 nicknames
-- ARGV  1 contributor  2 nickname; empty to remove it
-- Returns 1, or 0 if another contributor has a nickname that reads the same.
local function read(name) return string.gsub(string.lower(name), '[ _-]', '') end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 1
end
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  if known[i] ~= ARGV[1] and read(known[i + 1]) == read(ARGV[2]) then return 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
