-- What may be given, and giving it. Included behind `permits`.
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

local function next_fence(weight) -- P8, as for the lock; readers get the fence of the last writer
  local rises = limit ~= WHOLE or weight == WHOLE or fence == 0
  return string.format('%.0f', rises and math.max(fence + 1, now) or fence)
end

local function hold(token, weight, ms, had, its_fence)
  local over, new = now + ms * 1000, used == 0
  if had > 0 then over = math.max(over, redis.call('ZSCORE', PERMITS, token) or 0) end -- never shorter than it was
  redis.call('ZADD', PERMITS, over, token)
  used = math.max(used - had, 0) + weight
  fence = math.max(fence, tonumber(its_fence))
  local last, mine = string.format('%.0f', fence), weight .. ' ' .. its_fence
  redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, mine)
  if token == ARGV[1] then own = mine end
  saved, soonest = used, nil
  keep(ms, new)
end

local function left(time) -- milliseconds until then, or until the first permit is over; nil when there is none
  soonest = soonest or redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  time = time or soonest
  return time and math.max(1, math.ceil((tonumber(time) - now) / 1000))
end

local function fits(weight, had) return used - had + weight <= limit end

local function leave(ticket)
  redis.call('ZREM', QUEUE, ticket)
  redis.call('ZREM', POLLS, ticket)
  first = nil
end

local function waits(ticket) return ticket ~= '' and redis.call('ZSCORE', QUEUE, ticket) end
