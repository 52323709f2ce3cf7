-- What may be given, and giving it. Included behind `permit_state` and `soonest` (see `permit_first_expiry`).
-- include: permit_hold
redis.call('ZSCORE', POLLS, '') -- read, as all else in `permit_setup`, before anything is changed
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

-- Milliseconds until then, or until the first permit is over that is no tombstone; nil when there is none. Of very many
-- tombstones 64 are looked at: look again when those are over.
local function left(time)
  soonest = soonest or redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2]
  local undone = not time and soonest and tonumber(soonest) % 1 > 0
  time = time or soonest
  if undone then
    local ends, i = redis.call('ZRANGE', PERMITS, 0, 63, 'WITHSCORES'), 4
    while ends[i] and tonumber(ends[i]) % 1 > 0 do i = i + 2 end
    time = ends[i] or ends[128]
  end
  return time and math.max(1, math.ceil((tonumber(time) - now) / 1000))
end

local function fits(weight, had) return used - had + weight <= limit end

local function leave(ticket)
  redis.call('ZREM', QUEUE, ticket)
  redis.call('ZREM', POLLS, ticket)
  first = nil
end

local function waits(ticket) return ticket ~= '' and redis.call('ZSCORE', QUEUE, ticket) end
