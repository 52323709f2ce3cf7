-- Let a permit end ttl milliseconds from now, if its token has one.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ttl_ms  3 what its holder thinks that it weighs; less is not his: GONE
--       4 by a process that shares its permit: how many fences more it needs; 0: none
-- NARROW permits/narrow_renew 1 2
-- REPLY {0 GONE | 1 RENEWED, server time in us}; RENEWED with ARGV[4] also the first of those fences (0: none, as for
--       readers), and whether somebody waits
-- REPLAY  Sets the same remaining time again; reserves other fences. (Whose turn it is has it before that: the answer is
--         the same.)
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_setup
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
local waiting = settle('') ~= FREE
local had, ms, more, reserved = permit(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4] or 0), 0
local held = had and had >= tonumber(ARGV[3])
if held then
  local ended = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]))
  if more > 0 and fenced(had) then
    reserved = math.max(fence + 1, now)
    fence = reserved + more - 1
  end
  keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then ZADD is, too
  redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])
  if ended and ended > now + ms * 1000 then sooner() end
  if reserved > 0 then redis.call('HSET', STATE, 'fence', string.format('%.0f', fence)) end
end
save()
if not held or not ARGV[4] then return {held and 1 or 0, now} end
return {1, now, reserved, (waiting or used > limit) and 1 or 0} -- the limit may have been lowered
