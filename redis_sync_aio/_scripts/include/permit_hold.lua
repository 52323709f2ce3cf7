-- One permit: what it is, dropping and holding it; fences; how long the keys last. Part of `permit_queries`.
-- include: sharing_token

local function permit(token) -- its weight, fence (text), and attempt if it is upgraded; nil when there is none
  local found = token == ARGV[1] and own or redis.call('HGET', STATE, '=' .. token) or ''
  local weight, its_fence, attempt = string.match(found, '^(%d+) (%d+) ?(.*)$')
  return tonumber(weight), its_fence, attempt
end

local function drop(token) -- ZREM first: allowed when out of memory, and then so is the rest of the script
  redis.call('ZREM', PERMITS, token)
  used = used - (permit(token) or 0)
  redis.call('HDEL', STATE, '=' .. token)
  if token == ARGV[1] then own = '' end
  soonest = nil
end

local function keep(ms, new) -- as long as `lasts` asks for, and then twice
  local time, short = math.floor(now / 1000), not lasts(fence, ms)
  if short then kept = math.max(time, math.ceil(fence / 1000)) + 2 * math.max(3600000, math.ceil(1.25 * ms)) end
  if short or new then redis.call('PEXPIRE', PERMITS, kept - time) end -- first: it is allowed when out of memory
  if short then
    redis.call('HSET', STATE, 'kept', kept)
    redis.call('PEXPIRE', STATE, kept - time)
  end
end

local function fenced(weight) return limit ~= WHOLE or weight == WHOLE end -- readers get the fence of the last writer

local function next_fence(weight) -- P8, as for the lock
  local rises = fenced(weight) or fence == 0
  return string.format('%.0f', rises and math.max(fence + 1, now) or fence)
end

local function hold(token, weight, ms, had, its_fence, attempt)
  local over, new, shares = now + ms * 1000, used == 0, sharer(token)
  if had > 0 then over = math.max(over, redis.call('ZSCORE', PERMITS, token) or 0) end -- never shorter than it was
  redis.call('ZADD', PERMITS, over, token)
  used = math.max(used - had, 0) + weight
  fence = math.max(fence, its_fence + (shares and fenced(weight) and RANGE - 1 or 0))
  local last, mine = string.format('%.0f', fence), weight .. ' ' .. its_fence .. (attempt and ' ' .. attempt or '')
  if shares then redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, mine, 'shared', 1)
  else redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, mine) end
  if token == ARGV[1] then own = mine end
  saved, soonest = used, nil
  keep(ms, new)
end

local function save()
  if used ~= saved then redis.call('HSET', STATE, 'used', used) end
end
