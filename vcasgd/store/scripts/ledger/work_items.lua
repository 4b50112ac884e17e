-- Reads leases, of which workers can write any number of any length; included by scripts.
-- Includes short.lua
-- Limits MAX_WORK_ITEM_BYTES MAX_HOLDER_BYTES MAX_NUMBER_BYTES

-- The holder of a work item, 'worker|token', or false.
local function holder_of(holders, piece) return short(holders, piece, MAX_HOLDER_BYTES) end

-- A counter, or 0.
local function counter(counters, name)
  return tonumber(short(counters, name, MAX_NUMBER_BYTES) or 0) or 0
end

-- The work item at a place of a sorted set, 0 for the lowest score, and its score. One that is too
-- long to be a work item is removed, and reads as the end of the set. Only one at a time is read,
-- because a hundred long ones would take the server's memory.
local function item_at(set, place)
  -- Unlike ZRANGE, which could skip millions, this command only goes by places.
  local found = redis.call('ZREVRANGE', set, -1 - place, -1 - place, 'WITHSCORES')
  if found[1] and #found[1] > MAX_WORK_ITEM_BYTES then
    redis.call('ZREM', set, found[1])
    return nil
  end
  return found[1], tonumber(found[2])
end

-- The kind and the number of a work item, or nil.
local function parts_of(piece)
  if #piece <= MAX_WORK_ITEM_BYTES then return string.match(piece, '^(%a+):(%d+)$') end
end

-- Ends the lease of a work item, which can be leased again at once.
local function free(leases, holders, open, piece)
  local kind, number = parts_of(piece)
  redis.call('ZREM', leases, piece)
  redis.call('HDEL', holders, piece)
  redis.call('ZADD', open, kind == 'train' and number or -1, piece)
end
