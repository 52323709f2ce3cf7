-- Leave NAME free for `gap` ms (0: never) if it has been handed over without a break for BUSY_MS.
-- Included after `lock_queue`. Clients that poll for NAME (redis-py's Lock) stand in no queue, and
-- a hand-over leaves nothing for them to find. So they have a common ticket, POLLERS_TICKET: it
-- stands ahead of the queue for `gap` ms, as a ticket that is polled for. In POLLS it has the time
-- (ms) since when NAME was not free. A message tells the first waiter when to look.
-- pcall: the lock is released whatever type POLLS has.
-- include: notify_sooner
if holder and gap > 0 then
  local ms = math.floor(now / 1000)
  local since = redis.pcall('ZSCORE', POLLS, 'POLLERS_TICKET')
  if not since or type(since) == 'string' and since + 0 > ms then -- or the clock went back
    redis.pcall('ZADD', POLLS, ms, 'POLLERS_TICKET')
    redis.pcall('PEXPIRE', POLLS, QUEUE_TTL_MS)
  elseif type(since) == 'string' and ms - since >= BUSY_MS then
    redis.call('DEL', NAME) -- first: allowed when out of memory, and then so is the rest
    redis.call('ZADD', POLLS, ms + gap, 'POLLERS_TICKET')
    redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS)
    notify_sooner(gap)
    redis.call('ZADD', QUEUE, -1, 'POLLERS_TICKET')
    return ReleaseReply.RELEASED
  end
end
