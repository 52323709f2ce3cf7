-- Leave NAME free for `gap` ms, if it has been handed over without a break for BUSY_MS. Included behind `lock_queue`.
-- Clients that poll for NAME (redis-py's Lock) stand in no queue, and after a hand-over there is nothing for them to find.
-- So there is a ticket for all of them, OPEN: it stands ahead of the queue for `gap` ms, as one that is polled for. POLLS
-- has since when NAME was not free (ms). The first waiter hears when to look. pcall: it is released whatever POLLS is.
local BUSY_MS = 1500
local ms = math.floor(now / 1000)
local since = redis.pcall('ZSCORE', POLLS, OPEN)
if not since or type(since) == 'string' and since + 0 > ms then -- or the clock went back
  redis.pcall('ZADD', POLLS, ms, OPEN)
  redis.pcall('PEXPIRE', POLLS, QUEUE_TTL)
elseif type(since) == 'string' and ms - since >= BUSY_MS then
  redis.call('DEL', NAME) -- first: allowed when out of memory, and then so is the rest
  redis.call('ZADD', POLLS, ms + gap, OPEN)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
  sooner(gap)
  redis.call('ZADD', QUEUE, -1, OPEN)
  return 1
end
