-- Take the lock, or a place in its queue (or neither, when there is no ticket).
-- KEYS  name, queue, fence, polls
-- ARGV  1 token  2 ttl_ms (0 = for ever)  3 ticket ('' = do not queue)
--       4 poll_ms: so long a polling owner's ticket lives (0 = it has an inbox)  5 '1' if the token may be used again
-- REPLY fence                    GRANTED, for the whole ttl; the first of RANGE to a process that shares
--       {code, fence, ms left (-1 = for ever, -2 = nobody holds it), server time in us, soon}
--       code: 0 BUSY  2 QUEUED (fence: 1 if the ticket is new)  3 OWN (held by this token already)  4 SPENT
--       soon = 1: no release will wake us (a foreign holder, or a reservation): look again soon
-- REPLAY  A token that holds the lock is told so and a ticket that is queued keeps its place: nothing
--       changes. A copy that arrives after the release finds the token in FENCE and is SPENT.
-- COST  O(log waiters), and as much per dead waiter it drops
-- include: lock_keys
local token, ttl, ticket, poll_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local tail, settled = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
-- include: lock_fast_acquire
-- include: lock_queue
if poll_ms > 0 then redis.call('ZSCORE', POLLS, ticket) end -- POLLS is somebody else's key: change nothing
local holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
local last_token = last and string.sub(last, 18)
local spent = not holder and last_token == token and ARGV[5] ~= '1'
if ticket ~= '' and (spent or holder == token) then redis.call('ZREM', QUEUE, ticket) end
if poll_ms > 0 and (spent or holder == token) then redis.call('ZREM', POLLS, ticket) end
if spent then return {4, 0, -2, now, 0} end
if holder == token then
  local fence = last_token == token and string.sub(last, 1, 16) + 1 - fences_of(token) or next_fence(token, ttl)
  return {3, tonumber(fence), redis.call('PTTL', NAME), now, 0}
end
if not holder then
  if settle(ticket, heads()) == FREE then
    if ticket ~= '' then redis.call('ZREM', QUEUE, ticket) end
    if poll_ms > 0 then redis.call('ZREM', POLLS, ticket) end
    local fence = next_fence(token, ttl)
    hold(token, ttl)
    wanted(token) -- who was behind it in the queue
    return tonumber(fence)
  end
  settled = true
  holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
end
-- include: lock_enqueue
