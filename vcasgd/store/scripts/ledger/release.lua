#!lua flags=allow-oom
-- Returns a lease; the work item can be leased again at once.
-- KEYS  1 leases  2 holders  3 open
-- ARGV  1 worker  2 token  3 work item
-- Returns 1, or 0 if the worker no longer held the lease.
-- Includes expect_keys.lua
-- Includes ledger/work_items.lua
-- Limits MAX_NAME_BYTES
expect_keys('leases', 'holders', 'open')
expect_arguments(3, MAX_NAME_BYTES)
if holder_of(KEYS[2], ARGV[3]) ~= ARGV[1] .. '|' .. ARGV[2] then return 0 end
local kind, number = parts_of(ARGV[3])
redis.call('ZREM', KEYS[1], ARGV[3])
redis.call('HDEL', KEYS[2], ARGV[3])
redis.call('ZADD', KEYS[3], kind == 'train' and number or -1, ARGV[3])
return 1
