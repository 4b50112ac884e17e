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
free(KEYS[1], KEYS[2], KEYS[3], ARGV[3])
return 1
