-- Checks the last parts of a script's keys, and its arguments; included by scripts that workers run.
-- A worker chooses the keys that it passes. With a key that it can write in the place of one that
-- it can't, it could make a loop or a text as long as it likes.
local function expect_keys(...)
  for i, name in ipairs({...}) do
    if string.sub(KEYS[i] or '', -#name - 1) ~= ':' .. name then
      error('key ' .. i .. ' must be ' .. name)
    end
  end
end

-- A script blocks the server for as long as its loops over the arguments take.
local function expect_arguments(max, max_bytes)
  if #ARGV > max then error('at most ' .. max .. ' arguments are allowed') end
  for i = 1, #ARGV do
    if #ARGV[i] > max_bytes then
      error('argument ' .. i .. ' has more than ' .. max_bytes .. ' bytes')
    end
  end
end
