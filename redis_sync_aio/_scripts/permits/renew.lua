-- Let a permit end ttl milliseconds from now, if its token has one.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ttl_ms  3 the weight that its holder knows; if it weighs less it is not the
--        same permit: GONE  4 only from a sharing process: how many more fences it needs (0 = none)
-- REPLY  {Renewed: GONE or RENEWED, server time in us}; RENEWED with ARGV[4] also returns the first
--        of those fences (0 = none, as for readers), and 1 if a ticket waits, else 0
-- REPLAY Sets the same remaining time again; reserves other fences. Waiters that fit are granted
--        first, so the reply is the same.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
-- include: notify_sooner
local waiting = settle('') ~= FREE
local had, ms, more, reserved = permit(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4] or 0), 0
local held = had and had >= tonumber(ARGV[3])
if held then
  local ended = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]))
  if more > 0 and fenced(had) then
    reserved = math.max(fence + 1, now)
    fence = reserved + more - 1
  end
  keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then so is ZADD
  redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])
  soonest = nil
  if ended and ended > now + ms * 1000 then notify_sooner(left() or 1) end
  if reserved > 0 then redis.call('HSET', STATE, 'fence', string.format('%.0f', fence)) end
end
save()
if not held or not ARGV[4] then return {held and Renewed.RENEWED or Renewed.GONE, now} end
return {Renewed.RENEWED, now, reserved, (waiting or used > limit) and 1 or 0} -- limit was lowered
