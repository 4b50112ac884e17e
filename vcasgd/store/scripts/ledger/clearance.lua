-- Keeps labelled data in cleared pools; included by scripts that grant or renew leases.
-- Trusts only what the controller recorded about a worker, and the worker's pass, whose digest is
-- stored here. A job without labels needs no clearance.
-- Returns nil if the worker is cleared; else the reason, and true if the pass is valid.
local function clearance_missing(record, placed, clearances, worker, pass)
  local labels = redis.call('HGET', record, 'labels')
  if not labels or labels == '' then return nil end
  local entry = redis.call('HGET', placed, worker)
  if not entry then return 'the controller placed no such worker' end
  local pool, digest = string.match(entry, '^([^|]*)|(.*)$')
  if digest ~= '' and redis.sha1hex(pass) ~= digest then return 'its pass does not match' end
  local seen = ' ' .. (redis.call('HGET', clearances, pool) or '') .. ' '
  for label in string.gmatch(labels, '%S+') do
    if not string.find(seen, ' ' .. label .. ' ', 1, true) then
      return 'pool ' .. pool .. ' may not see ' .. label, true
    end
  end
  return nil
end
