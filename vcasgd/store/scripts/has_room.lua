-- Returns true if a push slot is free.
local function has_room(push_slots, window)
  -- The default applies until a parameter server sets the number of slots.
  return redis.call('ZCARD', push_slots) < tonumber(redis.call('GET', window) or 64)
end
