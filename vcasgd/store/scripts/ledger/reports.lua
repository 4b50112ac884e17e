-- Reports of the parameter servers of a job's shards; included by account.lua and reconcile.lua,
-- whose first arguments and keys are the same.
-- KEYS  1 work  2 leases  3 holders  4 open  5 evaluations  6 shards  7 blocks  8 counters
-- ARGV  1 shard  2 number of shards  3 server token  4 version  5 finished epochs
--       6 totals, as JSON  7 applied samples  8 newest evaluation point
-- A subtask is done, an epoch finished, and a point reached once it is so in every shard.
-- Includes ledger/applied.lua
-- Includes fence.lua
local shard, shards, finished = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[5])
local function of(name) return shard .. ':' .. name end

-- Stores the report. Returns the finished epochs, samples, and point of all shards.
local function store_report(cleared)
  redis.call('HSET', KEYS[6], of('token'), ARGV[3], of('version'), ARGV[4],
    of('finished'), finished, of('totals'), ARGV[6], of('samples'), ARGV[7], of('point'), ARGV[8],
    of('cleared'), cleared)
  local all, samples, point = finished, tonumber(ARGV[7]), tonumber(ARGV[8])
  for each = 0, shards - 1 do
    local other = redis.call('HMGET', KEYS[6], each .. ':finished', each .. ':samples', each .. ':point')
    all = math.min(all, tonumber(other[1] or 0))
    samples = math.min(samples, tonumber(other[2] or 0))
    point = math.min(point, tonumber(other[3] or 0))
  end
  redis.call('HSET', KEYS[1], 'finished', all, 'shards', shards)
  return all, samples, point
end

-- Opens the evaluations of finished epochs from `first` to `last`, or else that of the newest point.
local function open_evaluations(by_samples, first, last, point)
  if by_samples then first, last = point, point > 0 and point or -1 end
  for number = first, last do
    local name = string.format('%.0f', number)
    local piece = 'evaluate:' .. name
    if redis.call('HEXISTS', KEYS[5], name) == 0 and not redis.call('ZSCORE', KEYS[2], piece) then
      redis.call('ZADD', KEYS[4], 'NX', -1, piece)
    end
  end
end
