-- Let a reader become the writer as soon as it is alone: it is ahead of the queue, and nobody new gets in.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ttl_ms  3 ticket ('' = do not queue)  4 poll_ms
--       5 attempt: what tells this upgrade from others of the same token; of a ticket that is not polled for its
--       'inbox|id'
-- REPLY fence (GRANTED for the whole ttl), or as permits/acquire.lua: 0 BUSY  2 QUEUED  3 OWN (this attempt made it the
--       writer)  4 SPENT (undone before)  7 DEADLOCK (its permit, or another reader, is or waits to be the writer's)
--       8 GONE (the token does not read)
-- REPLAY  The writer is told so, a ticket that is queued keeps its place, an attempt that was undone is SPENT.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_setup
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
local token, ttl, ticket, poll_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local turn, more = settle(ticket)
local had, its_fence, attempt = permit(token)
local spent = permit(ARGV[5])
if had == WHOLE or not had or had == 0 or spent then
  if ticket ~= '' then leave(ticket) end
  settle('')
  save()
  if had ~= WHOLE or attempt ~= ARGV[5] then return {spent and 4 or had == WHOLE and 7 or 8, 0, -1, now, 0} end
  return {3, tonumber(its_fence), left(redis.call('ZSCORE', PERMITS, token)), now, had}
end
save()
local next_one = redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')
if next_one[1] and next_one[1] ~= ticket and tonumber(next_one[2]) < 0 then return {7, 0, -1, now, 0} end
if fits(WHOLE, had) then
  if ticket ~= '' then leave(ticket) end
  its_fence = next_fence(WHOLE)
  hold(token, WHOLE, ttl, had, its_fence, ARGV[5])
  if sharer(token) and redis.call('ZCARD', QUEUE) > 0 then wanted(token) end
  return tonumber(its_fence)
end
ahead = -1
-- include: permit_enqueue
