-- Reads the applied records of a job's shards; included by scripts of the ledger. A field
-- <shard>:<block> is a bitmap of the subtasks that are applied in the shard. Bits of epochs that a
-- shard has finished don't count.
-- Includes blocks.lua
local FULL = string.rep('\255', BLOCK / 8)

local function applied_record(key, reports, shards, per_epoch)
  local known, finished = {}, {}
  local record = {}

  function record.finished(shard)
    if not finished[shard] then
      finished[shard] = tonumber(redis.call('HGET', reports, shard .. ':finished') or 0)
    end
    return finished[shard]
  end

  function record.bits(shard, subtask)
    local field = shard .. ':' .. block_of(subtask)
    if known[field] == nil then known[field] = redis.call('HGET', key, field) or '' end
    return known[field], field
  end

  function record.add(shard, subtask)
    local bits, field = record.bits(shard, subtask)
    known[field] = with_bit(bits, subtask)
    redis.call('HSET', key, field, known[field])
  end

  -- True if a subtask is applied in every shard.
  function record.has(subtask)
    for shard = 0, shards - 1 do
      if subtask >= record.finished(shard) * per_epoch
        and not has_bit(record.bits(shard, subtask), subtask) then return false end
    end
    return true
  end

  -- The first subtask from `subtask` that a shard lacks, or `stop` if there is none before it.
  local function first_lacking(shard, subtask, stop)
    local first = math.max(subtask, record.finished(shard) * per_epoch)
    local bits = record.bits(shard, subtask)
    if bits == FULL then return stop end
    while first < stop and has_bit(bits, first) do
      first = first + 1
      if first % 8 == 0 then
        -- Whole bytes at a time.
        local place = math.floor(first % BLOCK / 8) + 1
        local lacking = string.find(bits, '[^\255]', place) or math.max(place, #bits + 1)
        first = first + 8 * (lacking - place)
      end
    end
    return math.min(first, stop)
  end

  -- The first subtask from `subtask` that is not applied in every shard, or the start of the next
  -- block if there is none before it.
  function record.next_open(subtask)
    local stop = (math.floor(subtask / BLOCK) + 1) * BLOCK
    for shard = 0, shards - 1 do
      if stop == subtask then break end
      stop = first_lacking(shard, subtask, stop)
    end
    return stop
  end

  return record
end
