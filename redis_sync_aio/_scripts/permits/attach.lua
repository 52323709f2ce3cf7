-- Let another token hold a permit that was detached. Weight and fence stay.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ttl_ms  3 the token that it replaces
-- REPLY  {Outcome, n, ms left, server time in us, m}: OWN (n: the fence, m: the weight); BUSY
--        (neither token has a permit; ms left is -1)
-- REPLAY A token that has the permit already gets OWN again, and the same time.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
-- include: notify_sooner
settle('')
local token, ms, before = ARGV[1], ARGV[2] + 0, ARGV[3]
if own ~= '' then before = token end
local weight, its_fence = permit(before)
if (weight or 0) == 0 then
  save()
  return {Outcome.BUSY, 0, -1, now, 0}
end
local ended, over = tonumber(redis.call('ZSCORE', PERMITS, before)), now + ms * 1000
keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then so is the rest
redis.call('ZADD', PERMITS, over, token)
if before ~= token then
  redis.call('ZREM', PERMITS, before)
  redis.call('HDEL', STATE, '=' .. before)
  redis.call('HSET', STATE, field, weight .. ' ' .. its_fence)
end
soonest = nil
if ended and ended > over then notify_sooner(left() or 1) end
save()
return {Outcome.OWN, tonumber(its_fence), ms, now, weight}
