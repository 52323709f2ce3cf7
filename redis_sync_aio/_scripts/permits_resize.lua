-- Set the limit. Growing grants those who fit at once; shrinking takes nothing away.
-- KEYS  permits, state, queue, polls
-- ARGV  1 the new limit
-- REPLY the limit before, 0 if there was none
-- REPLAY  Sets the same limit again.
-- COST  O(log permits + log waiters) for every waiter granted
-- include: permits
-- include: grants
-- include: turns
local first = begin()
local before = limit
limit = tonumber(ARGV[1])
redis.call('HSET', STATE, 'limit', limit, 'used', used)
redis.call('PEXPIRE', STATE, math.max(3600000, redis.call('PTTL', STATE)))
saved = used
settle('', first)
save()
return before
