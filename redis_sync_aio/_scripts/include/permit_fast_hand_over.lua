-- Release a permit the short way: the first ticket takes just what becomes free, so that all is
-- taken again, and it and the next one, if there is one, are plain. Does what `drop`, `settle` and
-- `hold` would do and returns RELEASED. It comes before those are made: half of the server's time.
-- Needs `held`: the weight that is released (text), if this way may be tried.
-- The ticket goes before PUBLISH: a server that takes no writes must not announce a grant.
-- include: permit_plain_ticket
local inbox, id, ms, weight, token = plain_ticket(held and ARGV[2] == '' and first[1])
local next_inbox, next_id = plain_ticket(inbox and first[3])
if inbox and (next_inbox or not first[3])
  and used - held + weight == limit then
  local other = tonumber(ends[ends[1] == ARGV[1] and 4 or 2])
  local next = fence < now and now or fence + 1
  if lasts(next, ms) and (not other or other % 1 == 0) then
    local digits = clock[1] .. string.sub('00000' .. clock[2], -6)
    local its_fence = next == now and digits or string.format('%.0f', next)
    local look = other and math.min(math.ceil((other - now) / 1000), ms) or ms
    local grant = id .. ' ' .. its_fence .. ' ' .. digits .. ' ' .. ms
    local before = weight + 0 == WRITER_WEIGHT and string.format(' %.0f', fence) or ''
    if next_id then
      grant = grant .. ' ' .. (next_inbox == inbox and next_id or 0) .. ' ' .. look
    end
    grant = grant .. before
    local heard = redis.call('ZREM', QUEUE, first[1]) and publish(inbox, grant, true)
    if heard ~= 0 and type(heard) == 'number' then
      redis.call('ZREM', PERMITS, ARGV[1])
      redis.call('HDEL', STATE, field)
      redis.call('ZADD', PERMITS, now + ms * 1000, token)
      if not other then redis.call('PEXPIRE', PERMITS, kept - (now - now % 1000) / 1000) end
      redis.call('HSET', STATE, 'used', limit, 'fence', its_fence,
        '=' .. token, weight .. ' ' .. its_fence .. before)
      if next_id and next_inbox ~= inbox then
        publish(next_inbox, next_id .. ' 0 ' .. digits .. ' ' .. look)
      end
      return ReleaseReply.RELEASED
    else -- no listener, or PUBLISH was refused: all is as it was
      redis.call('ZADD', QUEUE, first[2], first[1])
      redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
    end
  end
end
