-- Give up the permit of a token, and its place in the queue; whoever fits now gets what is free.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token ('' = only withdraw the ticket)  2 ticket ('' = none)
--       3 '1' if a copy of the acquire that this ends may still be under way: it is to find its token SPENT
-- REPLY 0 GONE (the token holds nothing)  1 RELEASED
-- REPLAY  The second run finds the token gone and changes nothing; the caller, who knows whether its first run
--       may have happened, reads GONE accordingly.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permits
local held = soonest and soonest + 0 > now and ARGV[3] ~= '1' and string.match(own, '^[1-9]%d*')
if held and not first[1] then -- Nobody waits, nothing is over or lost: what `drop` and `save` would do.
  redis.call('ZREM', PERMITS, ARGV[1])
  redis.call('HDEL', STATE, '=' .. ARGV[1])
  redis.call('HSET', STATE, 'used', used - held)
  return 1
end
-- include: hand_over
-- include: grants
-- include: turns
-- include: expire
-- include: spend
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had = permit(ARGV[1])
held = had and had > 0
if held then drop(ARGV[1]) end
if ARGV[3] == '1' then spend(ARGV[1]) end
settle('')
save()
return held and 1 or 0
