-- Free permits and waiting tickets; granting and dropping permits. Included after `permit_state`
-- and `soonest` (see `permit_first_expiry`).
-- include: sharing_token
redis.call('ZSCORE', POLLS, '') -- before anything is changed: it raises for a key of another type
local digits = clock[1] .. string.sub('00000' .. clock[2], -6)

-- Return weight, fence (text) and, of a writer, the previous fence (text) of a token's permit; nil
-- if there is none.
local function permit(token)
  local found = token == ARGV[1] and own or redis.call('HGET', STATE, '=' .. token) or ''
  local weight, its_fence, previous = string.match(found, '^(%d+) (%d+) ?(%d*)$')
  return tonumber(weight), its_fence, previous
end

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

-- Let the keys last as long as `lasts` asks for, and then twice. PEXPIRE first: it is allowed when
-- out of memory.
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

-- Whether a permit of that weight gets a fence of its own. Readers get the fence of the last
-- writer.
local function fenced(weight) return limit ~= WRITER_WEIGHT or weight == WRITER_WEIGHT end

local function next_fence(weight) -- P8, as for the lock
  local rises = fenced(weight) or fence == 0
  return string.format('%.0f', rises and math.max(fence + 1, now) or fence)
end

-- Return ' ' and the fence of the last writer for a writer, '' for any other permit.
local function previous(weight)
  return weight == WRITER_WEIGHT and string.format(' %.0f', fence) or ''
end

local function hold(token, weight, ms, its_fence)
  local new, shares = used == 0, sharer(token)
  redis.call('ZADD', PERMITS, now + ms * 1000, token)
  used = used + weight
  local mine = weight .. ' ' .. its_fence .. previous(weight)
  fence = math.max(fence, its_fence + (shares and fenced(weight) and FENCE_RANGE - 1 or 0))
  redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', string.format('%.0f', fence),
    '=' .. token, mine)
  if shares then redis.call('HSET', STATE, 'shared', 1) end
  if token == ARGV[1] then own = mine end
  saved, soonest = used, nil
  keep(ms, new)
end

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
