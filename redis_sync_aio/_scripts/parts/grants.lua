-- What may be given, and giving it. Included behind `permits`.
-- include: holding
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

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
