-- Turn the writer into a reader. Readers at the head of the queue get in.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token
-- REPLY  ReleaseReply: GONE (the token holds nothing) or RELEASED (it does not write any more)
-- REPLAY A token that reads stays a reader.
-- COST   O(log permits + log waiters), and as much for each expired permit and each waiter granted
-- include: permit_setup
local had, its_fence = permit(ARGV[1])
local held = had and had > 0
if held and had > 1 then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then so is HSET
  used = used - had + 1
  saved, own = used, '1 ' .. its_fence
  redis.call('HSET', STATE, 'used', used, '=' .. ARGV[1], own)
end
settle('')
save()
return held and ReleaseReply.RELEASED or ReleaseReply.GONE
