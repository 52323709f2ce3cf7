-- Take a permit away. Included after `permit_lookup`.

-- ZREM first: it is allowed when out of memory, and then so is the rest of the script.
local function drop(token)
  redis.call('ZREM', PERMITS, token)
  used = used - (permit(token) or 0)
  redis.call('HDEL', STATE, '=' .. token)
  if token == ARGV[1] then own = '' end
  soonest = nil
end

local function save()
  if used ~= saved then redis.call('HSET', STATE, 'used', used) end
end
