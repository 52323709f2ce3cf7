-- Let the writer be a reader again, or withdraw a reader's ticket to become it. Readers at the head get in.
-- KEYS  permits, state, queue, polls
-- ARGV  1 token  2 ticket ('' = none)  3 (of permits_release)
-- REPLY 0 GONE (the token holds nothing)  1 it reads
-- REPLAY  A token that reads stays one that reads. A copy that arrives after the next upgrade ends that.
-- COST  O(log permits + log waiters), and as much for every waiter granted
-- include: permits
-- include: grants
-- include: turns
-- include: expire
if ARGV[2] ~= '' then leave(ARGV[2]) end
local had, its_fence = permit(ARGV[1])
local held = had and had > 0
if held and had > 1 then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then HSET is, too
  used = used - had + 1
  saved, own = used, '1 ' .. its_fence
  redis.call('HSET', STATE, 'used', used, '=' .. ARGV[1], own)
end
settle('')
save()
return held and 1 or 0
