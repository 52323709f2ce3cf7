-- Set the limit. Growing grants those who fit at once; shrinking takes nothing away.
-- KEYS  permits, state, queue, polls
-- ARGV  1 the new limit
-- REPLY the limit before, 0 if there was none
-- REPLAY  Sets the same limit again.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permits
-- include: grants
-- include: turns
-- include: expire
local before = limit
limit = tonumber(ARGV[1])
redis.call('HSET', STATE, 'limit', limit, 'used', used)
saved = used
keep(0, false)
settle('')
save()
return before
