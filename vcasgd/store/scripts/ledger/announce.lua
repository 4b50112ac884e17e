-- Adds an event to a job's history, once.
-- KEYS  1 announced  2 events
-- ARGV  1 name of what happened  2 event, as JSON
-- Returns 1, or 0 if the name was announced before.
if redis.call('SADD', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 20000, '*', 'e', ARGV[2])
return 1
