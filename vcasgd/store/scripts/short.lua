-- Returns the value of a hash's field, or false if it has more bytes or doesn't exist; included by
-- scripts. Workers also write some hashes without a script, and values as long as they like.
local function short(hash, field, max_bytes)
  return redis.call('HSTRLEN', hash, field) <= max_bytes and redis.call('HGET', hash, field)
end
