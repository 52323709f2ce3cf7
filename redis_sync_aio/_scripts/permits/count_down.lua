-- Count a gate down, and open it at 0: all tickets are granted. Or close it again.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token of this count  2 by how much; 0: close it  3 the count of a gate that is closed
--        again, or that the server does not know  4 ms that the count is remembered at least
--        5 ms that the token is remembered, as long as the count is
-- REPLY  the count that is left; 0: it is open; below 0: it began at another count, and nothing was
--        changed
-- REPLAY A token that has counted does not count again, as long as it is remembered; the count is
--        remembered for longer.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
-- include: permit_tombstone
local by, whole = ARGV[2] + 0, ARGV[3] + 0
local count = limit == 0 and whole or math.max(-limit, 0)
if permit(ARGV[1]) then
  keep(ARGV[4] + 0, true) -- an identity that counts again: the count is remembered from now on
else
  local began = limit ~= 0 and (redis.call('HGET', STATE, 'whole') or whole) + 0 or whole
  if began ~= whole then return -began end
  count = by == 0 and whole or math.max(count - by, 0)
  limit = count == 0 and OPEN_LIMIT or -count
  redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', string.format('%.0f', fence),
    'whole', whole)
  leave_tombstone(ARGV[1], ARGV[5] + 0)
  kept = 0 -- neither an open gate nor a token keeps a closed gate for longer than ARGV[4]
  keep(ARGV[4] + 0, true)
  settle('')
end
save()
return count
