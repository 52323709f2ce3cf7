-- Give `ticket` its `place` in QUEUE, unless it has one, and keep it and a polling owner alive.
-- `perhaps_new`: the key may be new. Sets `new`: 1, or 0 if it had a place. Returns the error when out of memory.
local new = redis.pcall('ZADD', QUEUE, 'NX', place, ticket)
if type(new) == 'table' then -- out of memory: nobody new, but who is queued goes on
  if not redis.call('ZSCORE', QUEUE, ticket) then return new end
  new = 0
end
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or perhaps_new or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
