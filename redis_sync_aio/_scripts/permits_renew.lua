-- Let a permit end ttl milliseconds from now, if its token has one.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ttl_ms
-- REPLY {0 GONE | 1 RENEWED, server time in us}
-- REPLAY  Sets the same remaining time again.
-- COST  O(log permits), and O(log waiters) for every permit that is over
-- include: permits
-- include: grants
-- include: turns
local first = begin()
local had, ms = permit(ARGV[1]), tonumber(ARGV[2])
local held = had and had > 0
if held then
  redis.call('PEXPIRE', STATE, math.max(3600000, 2 * ms, redis.call('PTTL', STATE))) -- allowed when out of memory …
  redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1]) -- … and then this is, too
  keep(ms)
end
settle('', first)
save()
return {held and 1 or 0, now}
