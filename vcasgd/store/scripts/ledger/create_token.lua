-- Stores a new API token, unless its name is taken or there are too many.
-- KEYS  1 tokens  2 last uses of tokens
-- ARGV  1 name  2 token, as JSON  3 most tokens
-- Returns 'created', 'exists', or 'full'. A token that this call stored before counts as created.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then return known == ARGV[2] and 'created' or 'exists' end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
-- a use of an earlier token with this name may have been recorded after it was revoked
redis.call('HDEL', KEYS[2], ARGV[1])
return 'created'
