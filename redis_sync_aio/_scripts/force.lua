-- Take the lock away from whoever holds it; the next living waiter gets it.
-- KEYS  name, queue, fence, polls
-- REPLY 1 if it was held, 0 if not
-- REPLAY  Not for automatic repetition: the second run would hit the next holder. It is sent once.
-- COST  as release
-- include: keys
-- include: lock
local held = redis.call('GET', NAME) and 1 or 0
if settle('', heads()) ~= GRANTED then redis.call('DEL', NAME) end
return held
