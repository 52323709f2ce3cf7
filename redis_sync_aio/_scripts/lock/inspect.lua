-- Look at a lock. Changes nothing.
-- KEYS   name, queue, fence, polls
-- ARGV   1 how many tickets to show
-- REPLY  {holder or nil, ms left (-1 = forever, -2 = free), last fence or nil, its token or nil,
--        number of tickets, the first tickets}
-- REPLAY Reads only.
-- COST   O(log waiters + tickets shown)
local NAME, QUEUE, FENCE = KEYS[1], KEYS[2], KEYS[3]
-- include: lock_look
return {
  holder,
  redis.call('PTTL', NAME),
  last and string.sub(last, 1, 16),
  last and string.sub(last, 18),
  redis.call('ZCARD', QUEUE),
  redis.call('ZRANGE', QUEUE, 0, ARGV[1] - 1),
}
