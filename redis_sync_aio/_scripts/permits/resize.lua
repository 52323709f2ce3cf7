-- Set the limit until it is set again. Growing grants those that fit now; shrinking takes nothing
-- away.
-- KEYS   permits, state, queue, polls
-- ARGV   1 the new limit; PAUSED_LIMIT = grant nothing until the next resize
-- REPLY  the limit before, 0 if there was none
-- REPLAY Sets the same limit again.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
local before = limit
limit = tonumber(ARGV[1])
redis.call('HSET', STATE, 'limit', limit, 'used', used, 'resized', 1)
saved = used
keep(TEN_YEARS_MS, false) -- it is not forgotten like a limit that acquirers only imply
settle('')
save()
return before
