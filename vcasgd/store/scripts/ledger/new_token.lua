-- A token for a parameter server that starts, greater than all before.
-- KEYS  1 server tokens
-- ARGV  1 node  2 nonce, below 2^20
-- Returns the token as text: a count, and in its lowest 20 bits the nonce.
-- After a failover this server may have forgotten the newest tokens. The nonce makes those that
-- would be given out a second time differ all the same, so that one of two servers is fenced;
-- the clock makes the count overtake all that was forgotten, so that the newer one wins. (Only
-- the second depends on the clock, and it is a matter of progress, not of safety.)
local SHIFT = 1048576
local known = math.floor(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0) / SHIFT)
local count = math.max(known + 1, tonumber(redis.call('TIME')[1]))
-- below 2^53, so the number is exact; as text, because its digits would be rounded otherwise
local token = string.format('%.0f', count * SHIFT + tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], token)
return token
