-- Leave a tombstone: a copy of a request that arrives after its end finds it SPENT. `ms`: for how
-- long; TOMBSTONE_MS if that is nil. Included after `permit_queries`.
local function leave_tombstone(token, ms)
  ms = ms or TOMBSTONE_MS
  -- pcall: nothing was written yet, and the server may be out of memory
  local set = redis.pcall('ZADD', PERMITS, now + ms * 1000 - 0.5, token)
  if type(set) == 'table' then return end
  if token == ARGV[1] then own = '0 0' end
  soonest, saved = nil, used
  redis.call('HSET', STATE, 'used', used, '=' .. token, '0 0')
  keep(ms, true)
end
