-- Set the limit, until it is set again. Growing grants those who fit at once; shrinking takes nothing away.
-- KEYS  permits, state, queue, polls
-- ARGV  1 the new limit
-- REPLY the limit before, 0 if there was none
-- REPLAY  Sets the same limit again.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_setup
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
local TEN_YEARS_MS = 315360000000
local before = limit
limit = tonumber(ARGV[1])
redis.call('HSET', STATE, 'limit', limit, 'used', used, 'resized', 1)
saved = used
keep(TEN_YEARS_MS, false) -- not forgotten as an implied one is
settle('')
save()
return before
