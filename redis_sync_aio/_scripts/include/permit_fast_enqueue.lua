-- Queue for a permit the short way: all permits are taken, none has expired, no process shares, and
-- the first ticket is plain. Does what `settle` and `permit_enqueue` would do and returns QUEUED.
-- It comes before most functions are made: half of the server's time for a request that has to
-- wait.
-- include: permit_plain_ticket
-- The permit that ends first is not a tombstone: see `permit_state`.
local full = used >= limit and soonest and soonest + 0 > now and soonest % 1 == 0
local asks = ticket ~= '' and ticket ~= first[1] and poll_ms == 0 and own == '' and not ARGV[8]
if full and asks and weight <= limit and (asked == limit or asked == 0) and plain_ticket(first[1])
  and not redis.call('HGET', STATE, 'shared') then
  local place = math.max(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] + 1, now)
  local new = redis.pcall('ZADD', QUEUE, 'NX', place, ticket)
  if type(new) ~= 'table' then
    if new == 0 or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS) end
    return {Outcome.QUEUED, new, math.ceil((soonest - now) / 1000), now, Look.NONE}
  end
end
