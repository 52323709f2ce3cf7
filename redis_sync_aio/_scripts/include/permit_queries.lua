-- Free permits and waiting tickets; granting and dropping permits. Included after `permit_state`
-- and `soonest` (see `permit_first_expiry`).
-- include: permit_lookup
-- include: permit_drop
-- include: permit_keep
-- include: permit_hold
redis.call('ZSCORE', POLLS, '') -- read, as all in `permit_setup`, before anything is changed
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

-- Return the milliseconds until `time`, or until the first permit ends that is no tombstone; nil if
-- there is none. Of very many tombstones only 64 are read: look again when those have ended.
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

local function fits(weight) return used + weight <= limit end

local function leave(ticket)
  redis.call('ZREM', QUEUE, ticket)
  redis.call('ZREM', POLLS, ticket)
  first = nil
end
