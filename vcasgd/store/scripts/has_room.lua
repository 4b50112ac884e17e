-- Returns true if a push slot is free.
local function has_room(places, window)
  -- The default applies until a parameter server sets the number of slots.
  return redis.call('ZCARD', places) < tonumber(redis.call('GET', window) or 64)
end
