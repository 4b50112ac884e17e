#!lua flags=allow-oom
-- Returns a lease; the work item can be leased again at once.
-- KEYS  1 leases  2 holders  3 open
-- ARGV  1 worker  2 token  3 work item
-- Returns 1, or 0 if the worker no longer held the lease.
-- Includes expect_keys.lua
expect_keys('leases', 'holders', 'open')
if redis.call('HGET', KEYS[2], ARGV[3]) ~= ARGV[1] .. '|' .. ARGV[2] then return 0 end
local kind, number = string.match(ARGV[3], '^(%a+):(%d+)$')
redis.call('ZREM', KEYS[1], ARGV[3])
redis.call('HDEL', KEYS[2], ARGV[3])
redis.call('ZADD', KEYS[3], kind == 'train' and number or -1, ARGV[3])
return 1
