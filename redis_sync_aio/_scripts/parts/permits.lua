-- Shared by every script of permits (semaphores, readers and writers). Nothing is written until a function runs.
-- PERMITS: token -> until when (us). STATE: limit, used (sum of the weights), fence, and '=token' -> 'weight fence'
-- of each permit. A permit of weight 0 is the tombstone of a request that was undone: its late copies are SPENT.
local PERMITS, STATE, QUEUE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local QUEUE_TTL, WHOLE = 600000, 2147483647 -- a limit of WHOLE: readers weigh 1, a writer weighs it all
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local state = redis.call('HMGET', STATE, 'limit', 'used', 'fence')
local limit, used, fence = tonumber(state[1] or 0), tonumber(state[2] or 0), tonumber(state[3] or 0)
local saved = used

local function permit(token) -- its weight and fence (text), nil when there is none
  local weight, its_fence = string.match(redis.call('HGET', STATE, '=' .. token) or '', '^(%d+) (%d+)$')
  return tonumber(weight), its_fence
end

local function drop(token) -- ZREM first: allowed when out of memory, and then so is the rest of the script
  redis.call('ZREM', PERMITS, token)
  used = used - (permit(token) or 0)
  redis.call('HDEL', STATE, '=' .. token)
end

local function keep(ms) -- every permit is over before the keys are; PEXPIRE is allowed when out of memory
  local least = math.max(3600000, 2 * ms)
  if redis.call('PTTL', PERMITS) < least / 2 then redis.call('PEXPIRE', PERMITS, least) end
  if redis.call('PTTL', STATE) < least / 2 then redis.call('PEXPIRE', STATE, least) end
end

local function save()
  if used ~= saved then redis.call('HSET', STATE, 'used', used) end
  saved = used
end

-- Drop what is over. When either key was lost (evicted) nobody holds anything any more: the other one is cleared, too.
local function expire()
  if not state[2] then
    redis.call('ZREMRANGEBYRANK', PERMITS, 0, -1)
  elseif used > 0 and redis.call('EXISTS', PERMITS) == 0 then
    redis.call('DEL', STATE)
    redis.call('HSET', STATE, 'limit', limit, 'used', 0, 'fence', string.format('%.0f', fence))
    redis.call('PEXPIRE', STATE, 3600000)
    used, saved = 0, 0
  end
  repeat
    local over = redis.call('ZRANGEBYSCORE', PERMITS, '-inf', now, 'LIMIT', 0, 100)
    for _, token in ipairs(over) do drop(token) end
  until #over < 100
end
