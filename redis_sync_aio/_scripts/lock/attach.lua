-- Let another token hold a lease that was detached. Its fence stays.
-- KEYS   name, queue, fence, polls
-- ARGV   1 token  2 ttl_ms (0 = forever)  3 the token that it replaces
-- REPLY  {Outcome, n, ms left (-1 = forever, -2 = not held), server time in us, 0}: OWN (n: the
--        fence); BUSY (neither token holds the lock)
-- REPLAY A token that holds the lock already gets OWN again, and the same time.
-- COST   O(1); O(log waiters) if the lease ends sooner than before; as lock/release.lua if the
--        lock is not held
-- include: lock_keys
-- include: lock_queue
-- include: notify_sooner
local token, ttl = ARGV[1], ARGV[2]
local holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
if holder ~= ARGV[3] and holder ~= token then
  if not holder then settle('', heads()) end
  return {Outcome.BUSY, 0, redis.call('PTTL', NAME), now, 0}
end
local ended, fence = redis.call('PTTL', NAME)
if last and string.sub(last, 18) == holder then
  fence = string.sub(last, 1, 16)
  local keep = math.max(redis.call('PTTL', FENCE), remember(ttl) + 0)
  redis.call('SET', FENCE, fence .. ' ' .. token, 'PX', keep)
else
  fence = next_fence(token, ttl)
end
hold(token, ttl)
if ttl ~= '0' and (ended < 0 or ended > ttl + 0) then notify_sooner(ttl) end
return {Outcome.OWN, tonumber(fence), redis.call('PTTL', NAME), now, 0}
