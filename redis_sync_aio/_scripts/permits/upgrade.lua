-- Let a reader become the writer as soon as it is alone. It is ahead of the queue, and nobody new
-- gets in before it.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ttl_ms  3 ticket ('' = do not queue)  4 poll_ms  5 attempt: what distinguishes
--        this upgrade from others of the same token; of a ticket that is not polled for: 'inbox|id'
-- REPLY  the fence if GRANTED for the whole ttl, or {Outcome, n, ms, server time in us, m} as
--        permits/acquire.lua: BUSY, QUEUED, OWN (this attempt made it the writer), SPENT (undone),
--        DEADLOCK (its permit, or another reader, is the writer's or waits to be), or GONE (the
--        token does not read)
-- REPLAY The writer gets OWN, a queued ticket keeps its place, an undone attempt is SPENT.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
-- include: publish
-- include: permit_queries
-- include: permit_queue
-- include: permit_notify_contended
-- include: permit_expire
local token, ttl, ticket, poll_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local turn, more = settle(ticket)
-- include: permit_refuse_upgrade
save()
local next_one = redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')
if next_one[1] and next_one[1] ~= ticket and tonumber(next_one[2]) < 0 then
  return {Outcome.DEADLOCK, 0, FOREVER_MS, now, 0}
end
if fits(WRITER_WEIGHT, had) then
  if ticket ~= '' then leave(ticket) end
  its_fence = next_fence(WRITER_WEIGHT)
  hold(token, WRITER_WEIGHT, ttl, had, its_fence, ARGV[5])
  if sharer(token) and redis.call('ZCARD', QUEUE) > 0 then notify_contended(token) end
  return tonumber(its_fence)
end
local ahead, back = -now, false -- the score of a ticket that is ahead of all others
-- include: permit_enqueue
