-- Give `ticket` its `place` in QUEUE unless it has one, and keep it and a polling owner alive. The
-- place says when it came (us), or a little more: it is behind all others, whatever the clock says.
-- `perhaps_new`: the key may be new. Sets `new`: 1, or 0 if the ticket had a place. Returns the
-- error when the server is out of memory.
local new = redis.pcall('ZADD', QUEUE, 'NX', place, ticket)
if type(new) == 'table' then -- out of memory: no new tickets, but queued ones stay
  if not redis.call('ZSCORE', QUEUE, ticket) then return new end
  new = 0
end
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or perhaps_new or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS)
end
