-- Give a ticket its `former` place again (us as text; nil or '': none), if it was passed over
-- while its inbox had no listener: it is ahead of all that came later. Sets `back`: whether it
-- had lost its place. A place that is not in the past is that of another clock.
local back = (former or '') ~= '' and former + 0 < now and
  redis.pcall('ZADD', QUEUE, 'NX', former, ticket) == 1
