-- Shared by every script of permits (semaphores, readers and writers). Nothing is written until a function runs.
-- PERMITS: token -> until when (us). STATE: limit, used (sum of the weights), fence, and '=token' -> 'weight fence'
-- of each permit. A permit of weight 0 is the tombstone of a request that was undone: its late copies are SPENT.
local PERMITS, STATE, QUEUE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local QUEUE_TTL, WHOLE = 600000, 2147483647 -- a limit of WHOLE: readers weigh 1, a writer weighs it all
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local state = redis.call('HMGET', STATE, 'limit', 'used', 'fence')
local limit, used, fence = tonumber(state[1] or 0), tonumber(state[2] or 0), tonumber(state[3] or 0)

local function permit(token) -- its weight and fence (text), nil when there is none
  local weight, its_fence = string.match(redis.call('HGET', STATE, '=' .. token) or '', '^(%d+) (%d+)$')
  return tonumber(weight), its_fence
end

local function drop(token) -- ZREM first: allowed when out of memory, and then so is the rest of the script
  redis.call('ZREM', PERMITS, token)
  used = used - (permit(token) or 0)
  redis.call('HDEL', STATE, '=' .. token)
end

local function keep(ms) -- every permit is over before the keys are, PERMITS first; PEXPIRE is always allowed
  local least = math.max(3600000, 2 * ms)
  local ahead = math.max(0, math.floor((fence - now) / 1000)) -- the clock went back: the fence stays until it caught up
  if redis.call('PTTL', PERMITS) < 0.75 * least or ahead > 0 and redis.call('PTTL', STATE) < least + ahead then
    redis.call('PEXPIRE', PERMITS, math.max(least, redis.call('PTTL', PERMITS)))
    redis.call('PEXPIRE', STATE, math.max(least + ahead, redis.call('PTTL', STATE)))
  end
end

-- Drop what is over. When one of the two keys was lost (evicted) nothing is known of the permits: nobody holds any.
local function expire()
  local lost = not state[2] or used > 0 and redis.call('EXISTS', PERMITS) == 0
  if lost and state[2] then
    redis.call('DEL', STATE)
    redis.call('HSET', STATE, 'limit', limit, 'used', 0, 'fence', string.format('%.0f', fence))
    keep(0)
    used = 0
  elseif lost and redis.call('EXISTS', PERMITS) == 1 then -- asked first: a write lets the rest pass when out of memory
    redis.call('ZREMRANGEBYRANK', PERMITS, 0, -1)
  end
  repeat
    local over = redis.call('ZRANGEBYSCORE', PERMITS, '-inf', now, 'LIMIT', 0, 100)
    for _, token in ipairs(over) do drop(token) end
    if #over > 0 then redis.call('HSET', STATE, 'used', used) end
  until #over < 100
end
