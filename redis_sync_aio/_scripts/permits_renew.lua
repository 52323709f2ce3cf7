-- Let a permit end ttl milliseconds from now, if its token has one.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ttl_ms
-- REPLY {0 GONE | 1 RENEWED, server time in us}
-- REPLAY  Sets the same remaining time again. (Whose turn it is has it before that: the answer is the same.)
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permits
-- include: grants
-- include: turns
-- include: expire
settle('')
local had, ms = permit(ARGV[1]), tonumber(ARGV[2])
local held = had and had > 0
if held then
  keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then ZADD is, too
  redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])
end
save()
return {held and 1 or 0, now}
