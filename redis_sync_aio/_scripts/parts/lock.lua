-- Shared by every script of the lock. Nothing happens on the server until a function is called, but TIME.
-- A ticket is 'inbox|id|claim_ms|token': where to push the grant ('' = its owner polls), the number it has
-- there, for how long it is granted at first (0 = for ever), and the token that becomes the holder.
local GRANTED, RESERVED, FREE = 1, 2, 3
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255

local stored -- what FENCE holds, read once
local function last_grant()
  if stored == nil then stored = redis.call('GET', FENCE) end
  if stored then return string.match(stored, '^(%d+) (.*)$') end
end

-- P8: the hybrid clock. Greater than every earlier fence, also when the stored one was lost.
local function next_fence(token)
  local fence, last = now, tonumber((last_grant()))
  if last and last >= fence then fence = last + 1 end
  stored = string.format('%.0f ', fence) .. token
  redis.call('SET', FENCE, stored, 'PX', FENCE_TTL)
  return fence
end

local function hold(token, ms)
  if ms == '0' then redis.call('SET', NAME, token) else redis.call('SET', NAME, token, 'PX', ms) end
end

-- Tell whoever is next for how long the new holder has the lock: it looks again then, if nobody wakes it.
local function announce(ms)
  local next = redis.call('ZRANGE', QUEUE, 0, 0)[1]
  local inbox, id = string.match(next or '', '^([^|]+)|(%d+)|')
  if inbox then redis.pcall('PUBLISH', inbox, string.format('%s 0 %.0f %s', id, now, ms)) end
end

-- Give NAME to the first living ticket ahead of `mine`. GRANTED: somebody has it now. RESERVED: a polling
-- waiter is next and alive, NAME is its to take. FREE: nobody is ahead of `mine`.
-- The ticket goes first: ZREM is allowed when the server is out of memory, and after one write of a script
-- the server lets the others pass. PUBLISH comes before SET: 0 receivers mean that the waiter is gone.
local function settle(mine)
  while true do
    local head = redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')
    local ticket, place = head[1], head[2]
    if not ticket or ticket == mine then return FREE end
    local inbox, id, ms, token = string.match(ticket, '^([^|]*)|(%d+)|(%d+)|(.*)$')
    if not inbox or inbox == '' then
      local alive = redis.call('ZSCORE', POLLS, ticket)
      if alive and tonumber(alive) * 1000 > now then return RESERVED end
      redis.call('ZREM', QUEUE, ticket)
      redis.call('ZREM', POLLS, ticket)
    else
      redis.call('ZREM', QUEUE, ticket)
      local grant = string.format('%s %.0f %.0f %s', id, next_fence(token), now, ms)
      local heard = redis.pcall('PUBLISH', inbox, grant)
      if type(heard) == 'table' then -- we may not publish: its owner finds the reserved lock when it heals
        redis.call('ZADD', QUEUE, place, ticket)
        return RESERVED
      end
      if heard > 0 then
        hold(token, ms)
        announce(ms)
        return GRANTED
      end
    end
  end
end
