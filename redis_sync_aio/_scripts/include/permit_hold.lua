-- Grant a permit, and the fences for it. Included after `permit_lookup` and `permit_keep`.
-- include: sharing_token

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
  local last = string.format('%.0f', fence)
  if shares then
    redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, mine,
      'shared', 1)
  else
    redis.call('HSET', STATE, 'limit', limit, 'used', used, 'fence', last, '=' .. token, mine)
  end
  if token == ARGV[1] then own = mine end
  saved, soonest = used, nil
  keep(ms, new)
end
