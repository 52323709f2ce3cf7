-- What may be given, and giving it. Included behind `permits`.
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

local function next_fence(weight) -- P8, as for the lock; readers get the fence of the last writer
  if limit ~= WHOLE or weight == WHOLE or fence == 0 then fence = math.max(fence + 1, now) end
  return string.format('%.0f', fence)
end

local function hold(token, weight, ms, its_fence)
  redis.call('ZADD', PERMITS, now + ms * 1000, token)
  used = used + weight
  saved = used
  local last = string.format('%.0f', fence)
  redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, weight .. ' ' .. its_fence)
  keep(ms)
end

local function left() -- milliseconds until the first permit is over by itself, nil when there is none
  local score = redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  return score and math.max(1, math.ceil((tonumber(score) - now) / 1000))
end

local function fits(weight) return used + weight <= limit end

local function leave(ticket)
  redis.call('ZREM', QUEUE, ticket)
  redis.call('ZREM', POLLS, ticket)
end

local function waits(ticket) return ticket ~= '' and redis.call('ZSCORE', QUEUE, ticket) end
