-- Take a permit, or a place in the queue (or neither, when there is no ticket). Compare lock/acquire.lua.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ttl_ms  3 ticket ('' = do not queue)  4 poll_ms  5 weight  6 limit (0: as it is)  7 see permit_choose_limit
-- REPLY fence (GRANTED, for the whole ttl; the first of RANGE for who shares), or {code, n, ms, server time in us, m}
--       0 BUSY, 2 QUEUED (n = 1: ticket is new): ms until the first permit is over (-1 = never); m: a Look (of permit_enqueue)
--       3 OWN (the token holds a permit already): n its fence, ms left, m its weight
--       4 SPENT (undone)  5 MISMATCH: n = the server's limit (0: none), m = 1: by resize  6 TOO HEAVY: n = the limit
-- REPLAY  A token that holds is told so, a ticket that is queued keeps its place, what was undone is SPENT.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_keys
-- include: permit_state
local token, ttl, ticket, poll_ms = ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4] + 0
local weight, asked = ARGV[5] + 0, ARGV[6] + 0
-- include: permit_fast_acquire
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
local turn, more = settle(ticket) -- first: it may be this token that gets something, by another ticket
local had, its_fence = permit(token)
-- include: permit_choose_limit
if limit == 0 or differs or had or weight > limit then
  if waits(ticket) then
    leave(ticket)
    settle('')
    had, its_fence = permit(token)
  end
  save()
  if had == 0 then return {4, 0, -1, now, 0} end
  if had then return {3, tonumber(its_fence), left(redis.call('ZSCORE', PERMITS, token)), now, had} end
  return {(limit == 0 or differs) and 5 or 6, limit, -1, now, differs and resized and 1 or 0}
end
if turn == FREE and fits(weight, 0) then -- nothing was written yet if the request is new: refused when out of memory
  if more then leave(ticket) end
  its_fence = next_fence(weight)
  hold(token, weight, ttl, 0, its_fence)
  if more and settle('') ~= FREE then wanted(token) end -- it was queued: who is behind it may fit, too, or waits on
  return tonumber(its_fence)
end
save()
-- include: permit_enqueue
