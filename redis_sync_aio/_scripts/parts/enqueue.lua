local left, soon = redis.call('PTTL', NAME), 1
if holder and last and string.sub(last, 18) == holder then soon = 0 end
if ticket == '' then return {0, 0, left, now, soon} end
local place = (tail or 0) + 1
local new = redis.pcall('ZADD', QUEUE, 'NX', place, ticket)
if type(new) == 'table' then -- out of memory: nobody new, but who is queued goes on
  if not redis.call('ZSCORE', QUEUE, ticket) then return new end
  new = 0
end
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or not tail or settled or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
if holder then wanted(holder) end
return {2, 0, left, now, soon}
