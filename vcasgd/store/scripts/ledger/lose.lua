#!lua flags=allow-oom
-- Frees the leases of lost workers, and numbers the losses for the parameter servers. Idempotent.
-- KEYS  1 record  2 leases  3 holders  4 open  5 lost
-- ARGV  1 most losses to keep  2… workers, a bounded number
-- Returns the number of freed leases.
-- Includes ledger/work_items.lua
-- Tokens make this safe if a worker is alive after all: it can push until another one begins.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local lost = {}
for i = 2, #ARGV do
  lost[ARGV[i]] = true
  -- The empty name has the newest number.
  redis.call('ZADD', KEYS[5], redis.call('ZINCRBY', KEYS[5], 1, ''), ARGV[i])
end
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -2 - tonumber(ARGV[1]))

local cursor, freed = '0', {}
-- The scan is bounded, because workers can write the hash. What it leaves out expires.
for _ = 1, 2000 do
  local found = redis.call('HSCAN', KEYS[3], cursor, 'COUNT', 100)
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local piece, holder = found[2][i], found[2][i + 1]
    if #holder <= MAX_HOLDER_BYTES and lost[string.match(holder, '^(.*)|%d+$')] and parts_of(piece) then
      freed[#freed + 1] = piece
    end
  end
  if cursor == '0' then break end
end
for _, piece in ipairs(freed) do free(KEYS[2], KEYS[3], KEYS[4], piece) end
return #freed
