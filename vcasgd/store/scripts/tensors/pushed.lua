-- Reads positions and lease tokens of subtasks, which workers can write of any length; included by
-- scripts that workers run.
-- Includes short.lua
-- Limits MAX_NAME_BYTES MAX_NUMBER_BYTES

-- The end of a subtask's newest pushed update, and the update; nil if none was pushed.
local function last_pushed(pushed, subtask)
  local to, update = string.match(short(pushed, subtask, MAX_NAME_BYTES) or '', '^(%d+)|(.*)$')
  return tonumber(to), update
end

-- The newest token of a subtask's leases, or 0.
local function newest_token(tokens, subtask)
  return tonumber(short(tokens, subtask, MAX_NUMBER_BYTES) or 0) or 0
end
