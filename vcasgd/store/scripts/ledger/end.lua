#!lua flags=allow-oom
-- Ends a lease, for its holder: with the result of an evaluation or of the first snapshot, or without
-- one, so that the work item can be leased again at once.
-- KEYS  1 leases  2 holders  3 open, or the hash for the result
-- ARGV  1 worker  2 token  3 work item  4 field  5 result
-- Returns 1, or 0 if the worker no longer held the lease.
-- Includes expect_keys.lua
-- Includes ledger/work_items.lua
-- Limits MAX_STRING_BYTES
expect_keys('leases', 'holders')
expect_arguments(5, MAX_STRING_BYTES)
if holder_of(KEYS[2], ARGV[3]) ~= ARGV[1] .. '|' .. ARGV[2] then return 0 end
if ARGV[4] then
  redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
  redis.call('ZREM', KEYS[1], ARGV[3])
  redis.call('HDEL', KEYS[2], ARGV[3])
else
  free(KEYS[1], KEYS[2], KEYS[3], ARGV[3])
end
return 1
