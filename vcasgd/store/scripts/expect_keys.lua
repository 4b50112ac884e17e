-- Checks the last parts of a script's keys; included by scripts that workers run.
-- A worker chooses the keys that it passes. With a key that it can write in the place of one that
-- it can't, it could make a loop or a text as long as it likes.
local function expect_keys(...)
  for i, name in ipairs({...}) do
    if string.match(KEYS[i] or '', ':(%a+)$') ~= name then
      error('key ' .. i .. ' must be ' .. name)
    end
  end
end
