-- Join a barrier: take a place among the parties. The last one lets all of them pass.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ms for which its pass is remembered  3 ticket ('' = only as the last party)
--        4 poll_ms  5 its weight, 1  6 minus the number of parties  7 ms within which it asks
--        again, as long as it lives  8 only of a request that has no place yet: it may take one
-- REPLY  the fence of the last party (fence % parties is its rank), or {Outcome, n, ms until it is
--        to ask again, server time in us, m}: BUSY; QUEUED (n = 1: new); OWN (it passed; n: its
--        fence, its own ms, m: its weight); BROKEN (m = 1: until a reset; 0: it was reset, or the
--        place was lost); MISMATCH (n: the number of parties of the others)
-- REPLAY A party that has passed gets OWN, one with a place keeps it.
-- COST   O(parties * log parties)
-- include: permit_setup
-- include: barrier_break
settle('')
local token, ticket, parties = ARGV[1], ARGV[3], -ARGV[6]
local waiting = redis.call('ZRANGE', QUEUE, 0, -1)
-- include: barrier_party
if alive and #waiting + (present and 0 or 1) >= parties then
  if not present then waiting[#waiting + 1] = ticket end
  return pass(waiting)
elseif alive and ticket ~= '' then
  local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
  local place, perhaps_new, poll_ms = math.max((tail or 0) + 1, now), not tail, lives_ms
-- include: ticket_insert
  redis.call('HSET', STATE, 'limit', limit, 'used', used)
  keep(ARGV[2] + 0, false)
  return {Outcome.QUEUED, new, look, now, 0}
elseif not alive then
  send_away(ticket, parties)
end
save()
return {alive and Outcome.BUSY or Outcome.BROKEN, 0, FOREVER_MS, now, alive and 0 or 1}
