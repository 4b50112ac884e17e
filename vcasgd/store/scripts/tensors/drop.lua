-- Removes chunks of the version before the present one, to make room for those of the next one.
-- KEYS  1 fence  2 applied  3… chunks
-- ARGV  1 token  2 the present version
-- Returns 1. Returns 0 and removes nothing if another parameter server has taken over, or if the
-- present version is another one: a failover may have brought back the one that the chunks are of.
if tonumber(redis.call('GET', KEYS[1]) or 0) ~= tonumber(ARGV[1])
  or redis.call('HGET', KEYS[2], 'version') ~= ARGV[2] then
  return 0
end
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
