-- Release the permit of a token and withdraw its ticket; waiters that fit now get what is free.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token ('' = only withdraw the ticket)  2 ticket ('' = none)
--        3 '1' if a copy of the acquire that this ends may still be in flight: it shall be SPENT
-- REPLY  ReleaseReply: GONE (the token holds nothing) or RELEASED
-- REPLAY The second run finds the token gone and changes nothing. The caller knows whether its
--        first run may have released the permit, and reads GONE accordingly.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_keys
-- The short way: no ticket waits and no permit has expired. Does what `drop` and `save` would do.
if not first[1] and ARGV[2] == '' and ARGV[3] ~= '1' then
  local known = redis.call('HMGET', STATE, 'used', field)
  local held = string.match(known[2] or '', '^[1-9]%d*')
  local soonest = held and redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  local clock, rest = soonest and redis.call('TIME'), soonest and known[1] - held
  if soonest and soonest + 0 > clock[1] * 1000000 + clock[2] then
    redis.call('ZREM', PERMITS, ARGV[1])
    redis.call('HDEL', STATE, field)
    redis.call('HSET', STATE, 'used', rest)
    return ReleaseReply.RELEASED
  end
end
-- include: permit_state
-- include: publish
-- include: permit_first_expiry
local held = soonest and soonest + 0 > now and ARGV[3] ~= '1' and string.match(own, '^[1-9]%d*')
-- include: permit_fast_hand_over
-- include: permit_queue
-- include: permit_expire
-- include: permit_tombstone
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had = permit(ARGV[1])
held = had and had > 0
if held then drop(ARGV[1]) end
if ARGV[3] == '1' then leave_tombstone(ARGV[1]) end
settle('')
save()
return held and ReleaseReply.RELEASED or ReleaseReply.GONE
