-- Release a permit when no ticket waits and no permit has expired. Does what `drop` and `save`
-- would do and returns RELEASED, or leaves all as it was. Included after `permit_keys`.
if not first[1] and ARGV[2] == '' and ARGV[3] ~= '1' then
  local known = redis.call('HMGET', STATE, 'used', field)
  local held = string.match(known[2] or '', '^[1-9]%d*')
  local soonest = held and redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  local clock, rest = soonest and redis.call('TIME'), soonest and known[1] - held
  if soonest and soonest + 0 > clock[1] * 1000000 + clock[2] then
    redis.call('ZREM', PERMITS, ARGV[1])
    redis.call('HDEL', STATE, field)
    redis.call('HSET', STATE, 'used', rest)
    return ReleaseReply.RELEASED
  end
end
