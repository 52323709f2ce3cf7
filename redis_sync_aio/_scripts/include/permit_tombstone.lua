-- A tombstone: a copy of a request that arrives after its end finds what it asked for spent. Included behind `permit_queries`.
local TOMB_MS = 60000

local function spend(token)
  -- pcall: nothing was written yet, and the server may be out of memory
  local set = redis.pcall('ZADD', PERMITS, now + TOMB_MS * 1000 - 0.5, token)
  if type(set) == 'table' then return end
  if token == ARGV[1] then own = '0 0' end
  soonest, saved = nil, used
  redis.call('HSET', STATE, 'used', used, '=' .. token, '0 0')
  keep(TOMB_MS, true)
end
