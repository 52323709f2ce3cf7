-- Give up the permit of a token, and its place in the queue; whoever fits now gets what is free.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token ('' = only withdraw the ticket)  2 ticket ('' = none)
--       3 '1' if a copy of the acquire that this ends may still be under way: it is to find its token SPENT
-- NARROW permits/narrow_release 1 2
-- REPLY 0 GONE (the token holds nothing)  1 RELEASED
-- REPLAY  The second run finds the token gone and changes nothing; the caller, who knows whether its first run
--       may have happened, reads GONE accordingly.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_keys
if not first[1] and ARGV[2] == '' and ARGV[3] ~= '1' then -- Nobody waits, nothing is over: as `drop` and `save`.
  local known = redis.call('HMGET', STATE, 'used', field)
  local held = string.match(known[2] or '', '^[1-9]%d*')
  local soonest = held and redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  local clock = soonest and redis.call('TIME')
  if soonest and soonest + 0 > clock[1] * 1000000 + clock[2] then
    redis.call('ZREM', PERMITS, ARGV[1])
    redis.call('HDEL', STATE, field)
    redis.call('HSET', STATE, 'used', known[1] - held)
    return 1
  end
end
-- include: permit_state
-- include: permit_first_expiry
local held = soonest and soonest + 0 > now and ARGV[3] ~= '1' and string.match(own, '^[1-9]%d*')
-- include: permit_fast_hand_over
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
-- include: permit_tombstone
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had = permit(ARGV[1])
held = had and had > 0
if held then drop(ARGV[1]) end
if ARGV[3] == '1' then spend(ARGV[1]) end
settle('')
save()
return held and 1 or 0
