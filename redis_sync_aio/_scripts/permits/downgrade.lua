-- Let the writer be a reader again, or withdraw a reader's ticket to become it. Readers at the head get in.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ticket ('' = none)  3 '1' if a copy of the upgrade that this ends may still be under way: it is to
--       find its attempt SPENT  4 attempt: only what that upgraded; none: only what was acquired for writing
-- NARROW permits/narrow_downgrade 1 2
-- REPLY 0 GONE (the token holds nothing)  1 this attempt does not write (any more)
-- REPLAY  A token that reads stays one that reads, and one that was upgraded since stays the writer's.
-- COST  O(log permits + log waiters), and as much for every permit that is over and every waiter granted
-- include: permit_setup
-- include: permit_queries
-- include: permit_queue
-- include: permit_expire
-- include: permit_tombstone
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had, its_fence, attempt = permit(ARGV[1])
local held = had and had > 0
if held and had > 1 and attempt == (ARGV[4] or '') then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then HSET is, too
  used = used - had + 1
  saved, own = used, '1 ' .. its_fence
  redis.call('HSET', STATE, 'used', used, '=' .. ARGV[1], own)
end
if ARGV[3] == '1' then spend(ARGV[4]) end
settle('')
save()
return held and 1 or 0
