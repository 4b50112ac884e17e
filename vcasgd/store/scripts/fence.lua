-- Compares the token of the parameter server that calls with the one that may write; included by
-- scripts. Both functions return an error, or nil if the caller may write.

-- For calls that may come before a takeover.
local function fenced_by(held, token)
  if held and tonumber(held) > tonumber(token) then
    return redis.error_reply('FENCED a parameter server with token ' .. held .. ' has taken over')
  end
end

-- For calls after the takeover. Without a token, the server came back empty.
local function not_held(held, token)
  if not held then return redis.error_reply('NOSNAPSHOT') end
  if tonumber(held) ~= tonumber(token) then
    return redis.error_reply('FENCED a parameter server with token ' .. held .. ' has taken over')
  end
end
