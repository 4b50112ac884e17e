#!lua flags=allow-oom
-- Creates a token for a starting parameter server, greater than all earlier ones.
-- KEYS  1 server tokens
-- ARGV  1 node  2 nonce, below 2^20
-- Returns the token as text: a count, with the nonce in the lowest 20 bits.
-- After a failover this server may have lost the newest tokens. The nonce makes repeated counts
-- differ, so that one of two parameter servers is fenced. The clock makes the count exceed all
-- lost ones, so that the newer parameter server wins. Only this second property depends on the
-- clock, and it matters for progress, not for safety.
local SHIFT = 1048576
local known = math.floor(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0) / SHIFT)
local count = math.max(known + 1, tonumber(redis.call('TIME')[1]))
-- below 2^53, so the number is exact; returned as text, because a reply would round it
local token = string.format('%.0f', count * SHIFT + tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], token)
return token
