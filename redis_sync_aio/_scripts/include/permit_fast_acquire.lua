-- Acquire a permit the short way: no ticket waits, no permit has expired or was lost, it fits, the
-- keys last, and the process does not share. Does what `hold` would do and returns the fence, or
-- sets `soonest` (see `permit_first_expiry`). It comes before any function is made: what only the
-- others need is a seventh of the server's time for an uncontended permit.
-- When nothing is held there are tombstones at most, so PERMITS is not read: those that have ended
-- stay until the next release drops them.
local idle = used == 0
local soonest = not idle and redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
if not first[1] and own == '' and (asked == limit or asked == 0) and used + weight <= limit then
  -- Like `next_fence`, for a name that has a fence.
  local rises = limit ~= WRITER_WEIGHT or weight == WRITER_WEIGHT
  local next = rises and (fence < now and now or fence + 1) or fence
  local sound = idle or soonest and soonest + 0 > now -- of a lost STATE the keys do not last
  if sound and lasts(next, ttl) and string.sub(token, -1) ~= 'SHARING_MARK' then
    local its_fence = next == now and clock[1] .. string.sub('00000' .. clock[2], -6)
      or string.format('%.0f', next)
    redis.call('ZADD', PERMITS, now + ttl * 1000, token)
    if idle then redis.call('PEXPIRE', PERMITS, kept - (now - now % 1000) / 1000) end
    local before = weight == WRITER_WEIGHT and string.format(' %.0f', fence) or ''
    redis.call('HSET', STATE, 'used', used + weight, 'fence', its_fence,
      field, weight .. ' ' .. its_fence .. before)
    return before == '' and next or {Outcome.GRANTED, next, ttl, now, weight, fence}
  end
end
if idle then soonest = redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2] end
if limit == 0 then limit = asked end
-- include: permit_fast_enqueue
