local look = left() or -1
if until_poll and (look < 0 or until_poll < look) then look = math.max(1, math.ceil(until_poll)) end
local soon = turn == RESERVED and not until_poll and 1 or 0
if ticket == '' then return {0, 0, look, now, soon} end
local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
local new = redis.pcall('ZADD', QUEUE, 'NX', ahead or (tail or 0) + 1, ticket)
if type(new) == 'table' then -- out of memory: nobody new, but who is queued goes on
  if not redis.call('ZSCORE', QUEUE, ticket) then return new end
  new = 0
end
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or not tail or redis.call('PTTL', QUEUE) < QUEUE_TTL / 2 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
return {2, 0, look, now, soon}
