-- Take the lock away from whoever holds it; the next living waiter gets it. A process that shared it is told that it is
-- wanted: so it stops handing it on within its slice, rather than at its next renewal, which finds that it is gone.
-- KEYS  name, queue, fence, polls
-- REPLY 1 if it was held, 0 if not
-- REPLAY  Not for automatic repetition: the second run would hit the next holder. It is sent once.
-- COST  as release
-- include: lock_keys
-- include: lock_queue
local holder = redis.call('GET', NAME)
if settle('', heads()) ~= GRANTED then redis.call('DEL', NAME) end
if holder then wanted(holder, true) end
return holder and 1 or 0
