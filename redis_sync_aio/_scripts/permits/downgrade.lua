-- Turn the writer into a reader again, or withdraw a reader's ticket to become the writer. Readers
-- at the head of the queue get in.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token  2 ticket ('' = none)  3 '1' if a copy of the upgrade that this ends may still be
--        in flight: it shall find its attempt SPENT  4 attempt: downgrade only what that upgraded;
--        none: only what was acquired for writing
-- NARROW permits/narrow_downgrade 1 2
-- REPLY  Released: GONE (the token holds nothing) or RELEASED (this attempt does not write any
--        more)
-- REPLAY A token that reads stays a reader, and one that was upgraded since stays the writer.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
-- include: publish
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
-- include: permit_tombstone
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had, its_fence, attempt = permit(ARGV[1])
local held = had and had > 0
if held and had > 1 and attempt == (ARGV[4] or '') then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then so is HSET
  used = used - had + 1
  saved, own = used, '1 ' .. its_fence
  redis.call('HSET', STATE, 'used', used, '=' .. ARGV[1], own)
end
if ARGV[3] == '1' then leave_tombstone(ARGV[4]) end
settle('')
save()
return held and Released.RELEASED or Released.GONE
