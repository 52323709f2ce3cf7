-- Give up what a token holds, and its place in the queue; the next living waiter gets the lock at once.
-- KEYS  name, queue, fence, polls
-- ARGV  1 token ('' = only withdraw the ticket)  2 ticket ('' = none)
--       3 '1' if the acquire that this undoes may still be under way: it is to find its token SPENT
-- REPLY 0 GONE (nobody holds the lock)  1 RELEASED  2 TAKEN (another token holds it)
-- REPLAY  The second run finds the token gone and changes nothing; it can not tell who did it, so the
--       caller, who knows whether its first run may have happened, reads GONE and TAKEN accordingly. (Only an
--       identity that waits for itself elsewhere is not told from that other one: it would be released, too.)
-- COST  O(log waiters), and as much for every dead waiter it drops
-- include: keys
local holder = redis.call('GET', NAME)
if ARGV[2] ~= '' then
  redis.call('ZREM', QUEUE, ARGV[2])
  redis.call('ZREM', POLLS, ARGV[2])
end
if holder and holder ~= ARGV[1] then return 2 end
local first = redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
if holder and not first[1] then return redis.call('DEL', NAME) end
-- include: lock
local next = settle('', first)
if not holder then
  local last = redis.call('GET', FENCE)
  if ARGV[3] == '1' and next == FREE and string.sub(last or '', 18) ~= ARGV[1] then pcall(next_fence, ARGV[1], '1') end
  return 0
end
if next ~= GRANTED then redis.call('DEL', NAME) end
return 1
