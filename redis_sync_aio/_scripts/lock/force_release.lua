-- Take the lock away from any holder; the next living waiter gets it. A sharing process hears that
-- it is contended, so it stops handing the lock over within its slice, before its next renewal
-- finds the lock gone.
-- KEYS   name, queue, fence, polls
-- REPLY  ReleaseReply.RELEASED if it was held, else GONE
-- REPLAY Not safe to repeat: a second run would hit the next holder. So it is sent only once.
-- COST   as lock/release.lua
-- include: lock_keys
-- include: lock_queue
-- include: notify_contended
local holder = redis.call('GET', NAME)
if settle('', heads()) ~= GRANTED then redis.call('DEL', NAME) end
if holder then notify_contended(holder) end
return holder and ReleaseReply.RELEASED or ReleaseReply.GONE
