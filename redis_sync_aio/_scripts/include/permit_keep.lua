-- Let the keys last as long as `lasts` asks for, and then twice. Included after `permit_lasts`.
-- PEXPIRE first: it is allowed when out of memory.
local function keep(ms, new)
  local time, short = math.floor(now / 1000), not lasts(fence, ms)
  if short then
    kept = math.max(time, math.ceil(fence / 1000)) + 2 * math.max(HOUR_MS, math.ceil(1.25 * ms))
  end
  if short or new then redis.call('PEXPIRE', PERMITS, kept - time) end
  if short then
    redis.call('HSET', STATE, 'kept', kept)
    redis.call('PEXPIRE', STATE, kept - time)
  end
end
