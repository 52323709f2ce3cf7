-- Withdraw the ticket ARGV[2], release what ARGV[1] holds and hand it over; return the reply.
-- Needs `holder` and `gap`.
if ARGV[2] ~= '' then
  redis.call('ZREM', POLLS, ARGV[2]) -- first: for another type it raises before any change
  redis.call('ZREM', QUEUE, ARGV[2])
end
if holder and holder ~= ARGV[1] then return ReleaseReply.TAKEN end
local first = redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
if holder and not first[1] then
  if gap > 0 then redis.pcall('ZREM', POLLS, 'POLLERS_TICKET') end
  return redis.call('DEL', NAME)
end
-- include: lock_queue
if holder and gap > 0 then
-- include: lock_poller_gap
end
local next = settle('', first)
if not holder then
  local last = redis.call('GET', FENCE)
  if ARGV[3] == '1' and next == FREE and string.sub(last or '', 18) ~= ARGV[1] then
    pcall(next_fence, ARGV[1], '1')
  end
  return ReleaseReply.GONE
end
if next ~= GRANTED then redis.call('DEL', NAME) end
return ReleaseReply.RELEASED
