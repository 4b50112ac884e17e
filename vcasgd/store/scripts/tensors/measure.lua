-- Measures the next keys of a tensors server that workers can write: payloads and states (u:),
-- moments (o:), a shard's other keys, and the first snapshot (s:), which is the platform's once it
-- is there. Only the platform writes repetitions (r:).
-- ARGV  1 cursor, '0' to start  2 number of keys, about
-- Returns {next cursor, '0' at the end; 's:job' or 'u:job', bytes, …}.
local found = redis.call('SCAN', ARGV[1], 'MATCH', 'vcasgd:{*', 'COUNT', ARGV[2])
local sums, answer = {}, {found[1]}
for _, key in ipairs(found[2]) do
  local job, kind = string.match(key, '^vcasgd:{([^:}]+):%d+}:([^:]+)')
  if job and kind ~= 'r' then
    local name = (kind == 's' and 's:' or 'u:') .. job
    sums[name] = (sums[name] or 0) + (redis.call('MEMORY', 'USAGE', key) or 0)
  end
end
for name, bytes in pairs(sums) do
  answer[#answer + 1] = name
  answer[#answer + 1] = bytes
end
return answer
