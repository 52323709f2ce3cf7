-- Drop expired permits. Included after `permit_queue`. If one of the two keys was lost (evicted),
-- nothing is known of the permits, so none is held.
if used > 0 and not soonest then
  local resized = redis.call('HGET', STATE, 'resized')
  redis.call('DEL', STATE)
  redis.call('HSET', STATE, 'limit', limit, 'used', 0, 'fence', string.format('%.0f', fence),
    'kept', kept)
  if resized then redis.call('HSET', STATE, 'resized', 1) end
  redis.call('PEXPIRE', STATE, math.max(HOUR_MS, kept - math.floor(now / 1000)))
  used, saved, own = 0, 0, ''
elseif soonest and not state[2] then
  redis.call('ZREMRANGEBYRANK', PERMITS, 0, -1)
  soonest = nil
end
moved = used >= limit
if soonest and tonumber(soonest) <= now then
  repeat
    local over = redis.call('ZRANGEBYSCORE', PERMITS, '-inf', now, 'LIMIT', 0, 100)
    for _, token in ipairs(over) do drop(token) end
  until #over < 100
end
