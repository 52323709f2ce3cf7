-- Acquire a permit, or take a place in the queue (without a ticket neither, if it does not fit).
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ttl_ms  3 ticket ('' = do not queue)  4 poll_ms: the lifetime of a polling
--        client's ticket (0 = it has an inbox)  5 weight  6 limit (0 = the server's)
--        7 whose limit counts: see permit_choose_limit.lua  8 queue_limit.lua  9 ticket_return.lua
-- REPLY  the fence if granted for the whole ttl (to a sharing process the first of FENCE_RANGE), or
--        {Outcome, n, ms until the first permit ends (-1 = never), server time in us, m}: BUSY;
--        QUEUED (n = 1: new; m: a Look); OWN, and GRANTED to a writer (n: its fence, its own ms, m:
--        its weight, of a writer also the fence of the one before); SPENT (undone); MISMATCH (n:
--        the server's limit, 0 = none; m = 1: set by a resize); TOO_HEAVY (n: the limit);
--        QUEUE_FULL (n: tickets in the queue)
-- REPLAY A holder gets OWN, a queued ticket keeps its place, and an undone acquire is SPENT.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_keys
-- include: permit_state
local token, ttl, ticket, poll_ms = ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4] + 0
local weight, asked = ARGV[5] + 0, ARGV[6] + 0
-- include: permit_fast_acquire
-- include: publish
-- include: permit_queue
-- include: notify_contended
-- include: permit_expire
-- include: permit_return
local had, its_fence = permit(token)
-- include: permit_choose_limit
-- include: permit_refuse
if turn == FREE and fits(weight) then
  -- If the request is new nothing was written yet, so this is refused when out of memory.
  if more then leave(ticket) end
  local its_fence, before = next_fence(weight), tonumber(previous(weight))
  hold(token, weight, ttl, its_fence)
  if more and settle('') ~= FREE then notify_contended(token) end
  its_fence = tonumber(its_fence)
  return before and {Outcome.GRANTED, its_fence, ttl, now, weight, before} or its_fence
end
save()
-- include: permit_enqueue
