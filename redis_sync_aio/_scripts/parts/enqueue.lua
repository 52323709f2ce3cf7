holder, last, last_token = redis.call('GET', NAME), last_grant()
local left, soon = redis.call('PTTL', NAME), holder == last_token and 0 or 1
if ticket == '' then return {0, 0, left, now, soon} end
local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
redis.call('ZADD', QUEUE, 'NX', (tail or 0) + 1, ticket)
redis.call('PEXPIRE', QUEUE, QUEUE_TTL)
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
return {2, 0, left, now, soon}
