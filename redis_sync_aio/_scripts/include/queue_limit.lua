-- Refuse a request that would wait behind `most` other tickets (text; nil or '': any number). One
-- that has a ticket in the queue keeps it. Needs `ticket`, which is not empty, and `ends_in`: the
-- ms until what it waits for may be free.
if (most or '') ~= '' and not redis.call('ZSCORE', QUEUE, ticket) then
  local waiting = redis.call('ZCARD', QUEUE)
  if waiting >= most + 0 then return {Outcome.QUEUE_FULL, waiting, ends_in, now, 0} end
end
