-- Release what a token holds and withdraw its ticket; the next living waiter gets the lock in the
-- same step. The record of a robust lock ends with its lease.
-- KEYS   name, queue, fence, polls; of a robust lock also its record
-- ARGV   1 token ('' = only withdraw the ticket)  2 ticket ('' = none)  3 '1' if the acquire that
--        this undoes may still be in flight: it shall find its token SPENT  4 see lock_poller_gap;
--        missing or 0: no gap. Of a robust lock 4 and 5 are those of robust_end_record
-- REPLY  ReleaseReply: GONE (the lock is not held), RELEASED, or TAKEN (another token holds it)
-- REPLAY The second run finds the token gone and changes nothing. It cannot tell whether the first
--        run released the lock; the caller knows whether that may have happened, and reads GONE and
--        TAKEN accordingly. (An identity that waits for itself elsewhere is the exception: its next
--        lease cannot be told from this one and would be released, too.)
-- COST   O(log waiters), and as much for each dead waiter it drops
-- include: lock_keys
local holder, record = redis.call('GET', NAME), KEYS[5]
local gap = not record and (ARGV[4] or 0) + 0 or 0
if ARGV[2] ~= '' then
  redis.call('ZREM', POLLS, ARGV[2]) -- first: for another type it raises before any change
  redis.call('ZREM', QUEUE, ARGV[2])
end
if holder and holder ~= ARGV[1] then return ReleaseReply.TAKEN end
-- include: robust_end_record
local first = redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
if holder and not first[1] then
  if gap > 0 then redis.pcall('ZREM', POLLS, 'POLLERS_TICKET') end
  return redis.call('DEL', NAME)
end
-- include: lock_queue
-- include: lock_poller_gap
local next = settle('', first)
if holder then
  if next ~= GRANTED then redis.call('DEL', NAME) end
  return ReleaseReply.RELEASED
end
local spent = string.sub(redis.call('GET', FENCE) or '', 18) == ARGV[1]
if ARGV[3] == '1' and next == FREE and not spent then pcall(next_fence, ARGV[1], '1') end
return ReleaseReply.GONE
