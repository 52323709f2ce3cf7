-- Acquire the lock, or take a place in its queue (without a ticket neither, while it is taken).
-- KEYS   name, queue, fence, polls
-- ARGV   1 token  2 ttl_ms (0 = forever)  3 ticket ('' = do not queue)  4 poll_ms: how long a
--        ticket lives (0 = inbox)  5 '1': reusable  6 queue_limit  7 ticket_return  8 next_fence
-- REPLY  the fence if GRANTED for the whole ttl (to a sharing process the first of FENCE_RANGE), or
--        {Outcome, n, ms left (-1 = forever, -2 = not held), server time in us, Look}:
--        BUSY; QUEUED (n = 1: new); OWN (n: its fence); SPENT; QUEUE_FULL (n: tickets in the queue)
-- REPLAY A holder gets OWN, a queued ticket keeps its place, and a copy after the release is SPENT.
-- COST   O(log waiters), and as much for each dead waiter it drops
-- include: lock_keys
local token, ttl, ticket, poll_ms, least = ARGV[1], ARGV[2], ARGV[3], ARGV[4] + 0, ARGV[8]
local tail, settled, former = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2], nil, ARGV[7]
-- include: lock_fast_acquire
-- include: lock_queue
-- include: notify_contended
if poll_ms > 0 then redis.call('ZSCORE', POLLS, ticket) end -- raises for a key of another type
-- include: lock_look
local last_token = last and string.sub(last, 18)
local spent = not holder and last_token == token and ARGV[5] ~= '1'
if ticket ~= '' and (spent or holder == token) then redis.call('ZREM', QUEUE, ticket) end
if poll_ms > 0 and (spent or holder == token) then redis.call('ZREM', POLLS, ticket) end
if spent then return {Outcome.SPENT, 0, FREE_MS, now, 0} end
if holder == token then
  local fence = last_token == token and string.sub(last, 1, 16) + 1 - fences_of(token)
  return {Outcome.OWN, tonumber(fence or next_fence(token, ttl)), redis.call('PTTL', NAME), now, 0}
end
-- include: ticket_return
if not holder then
  settled = settle(ticket, heads())
  if settled == FREE then
    if ticket ~= '' then redis.call('ZREM', QUEUE, ticket) end
    if poll_ms > 0 then redis.call('ZREM', POLLS, ticket) end
    local fence = next_fence(token, ttl, nil, least)
    hold(token, ttl)
    if sharer(token) and redis.call('ZCARD', QUEUE) > 0 then notify_contended(token) end
    return tonumber(fence)
  end
  holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
end
-- include: lock_enqueue
