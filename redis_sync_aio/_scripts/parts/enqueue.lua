local left, soon = redis.call('PTTL', NAME), 1
if holder and last and string.sub(last, 18) == holder then soon = 0 end
if ticket == '' then return {0, 0, left, now, soon} end
local place = (tail or 0) + 1
local new = redis.call('ZADD', QUEUE, 'NX', place, ticket)
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or not tail or settled or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
return {2, 0, left, now, soon}
