-- Labelled data stays in pools that may see it; included by scripts that give or renew leases.
-- Believed is what the controller recorded of a worker, and nothing that the worker says but its
-- pass, of which only a digest is kept here. A job without labels asks for nothing.
-- Returns why not and whether it is that worker that asks; nil where it may.
local function clearance_missing(record, placed, clearances, worker, pass)
  local labels = redis.call('HGET', record, 'labels')
  if not labels or labels == '' then return nil end
  local entry = redis.call('HGET', placed, worker)
  if not entry then return 'the controller placed no such worker' end
  local pool, digest = string.match(entry, '^([^|]*)|(.*)$')
  if digest ~= '' and redis.sha1hex(pass) ~= digest then return 'it is not the worker it says' end
  local seen = ' ' .. (redis.call('HGET', clearances, pool) or '') .. ' '
  for label in string.gmatch(labels, '%S+') do
    if not string.find(seen, ' ' .. label .. ' ', 1, true) then
      return 'pool ' .. pool .. ' may not see ' .. label, true
    end
  end
  return nil
end

-- an event for each new reason, not for each time that somebody asks
local function say_refused(refused, events, worker, why)
  if redis.call('HGET', refused, worker) == why then return end
  redis.call('HSET', refused, worker, why)
  local event = cjson.encode({
    at = tonumber(redis.call('TIME')[1]), kind = 'lease-refused',
    text = worker .. ' gets no work: ' .. why, details = {worker = worker, why = why}})
  redis.call('XADD', events, 'MAXLEN', '~', 20000, '*', 'e', event)
end
