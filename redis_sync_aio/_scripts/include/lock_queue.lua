-- Shared by every script of the lock. Nothing happens on the server until a function is called, but TIME.
-- A ticket is 'inbox|id|claim_ms|token': where to push the grant ('' = its owner polls), the number it has
-- there, for how long it is granted at first (0 = for ever), and the token that becomes the holder.
-- include: publish
local GRANTED, RESERVED, FREE = 1, 2, 3
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local digits = clock[1] .. string.sub('00000' .. clock[2], -6) -- the same as text: 16 digits until 2286

-- P8: the hybrid clock. Greater than every earlier fence, also when the stored one was lost. Returns text.
-- Of a range the first is returned and the last is stored.
local function next_fence(token, ms, range)
  local fence, keep, more = digits, remember(ms), (range or fences_of(token)) - 1
  local function upto() return more == 0 and fence or string.format('%.0f', fence + more) end
  local last = redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep, 'GET')
  if last and string.sub(last, 1, 16) >= fence then -- the clock stood still, or went back
    fence = string.format('%.0f', tonumber(string.sub(last, 1, 16)) + 1)
    redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep + math.floor((fence - now) / 1000)) -- it catches up
  end
  return fence
end

-- Tell a process that shares what it holds that it is wanted: if somebody waits, or anyway.
local function wanted(holder, anyway)
  local inbox, id = sharer(holder)
  if inbox and (anyway or redis.call('ZCARD', QUEUE) > 0) then
    push('rsa:' .. inbox, id .. ' -2 ' .. digits .. ' 0')
  end
end

-- Tell the first waiter, or if nobody hears that the second, that NAME is free in ms, sooner than it was told.
local function sooner(ms)
  for _, ticket in ipairs(redis.call('ZRANGE', QUEUE, 0, 1)) do
    local inbox, id = string.match(ticket, '^([^|]+)|(%d+)|')
    if inbox and push(inbox, id .. ' 0 ' .. digits .. ' ' .. ms) ~= 0 then return end
  end
end

local function hold(token, ms)
  if ms == '0' then redis.call('SET', NAME, token) else redis.call('SET', NAME, token, 'PX', ms) end
end

local function heads() return redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES') end

-- Give NAME to the first living ticket ahead of `mine`; `first` is what heads() gave. GRANTED: somebody has it
-- now. RESERVED: a polling waiter is next and alive, NAME is its to take. FREE: nobody is ahead of `mine`.
-- The ticket goes first: ZREM is allowed when the server is out of memory, and after one write of a script
-- the server lets the others pass. PUBLISH comes before SET: 0 receivers mean that the waiter is gone.
-- The one after is told too for how long the new holder has it: it looks again then, if nobody wakes it.
local function settle(mine, first)
  while true do
    local ticket, place, following = first[1], first[2], first[3]
    if not ticket or ticket == mine then return FREE end
    local inbox, id, ms, token = string.match(ticket, '^([^|]*)|(%d+)|(%d+)|(.*)$')
    if not inbox or inbox == '' then
      local alive = redis.call('ZSCORE', POLLS, ticket)
      if alive and tonumber(alive) * 1000 > now then return RESERVED end
      redis.call('ZREM', QUEUE, ticket)
      redis.call('ZREM', POLLS, ticket)
    else
      redis.call('ZREM', QUEUE, ticket)
      local next_inbox, next_id = string.match(following or '', '^([^|]+)|(%d+)|')
      local grant = id .. ' ' .. next_fence(token, ms) .. ' ' .. digits .. ' ' .. ms
      if following then grant = grant .. ' ' .. (next_inbox == inbox and next_id or 0) end -- 0: somebody else waits
      local heard = push(inbox, grant)
      if type(heard) == 'table' then -- we may not publish: its owner finds the reserved lock when it heals
        redis.call('ZADD', QUEUE, place, ticket)
        redis.call('PEXPIRE', QUEUE, QUEUE_TTL)
        return RESERVED
      end
      if heard > 0 then
        hold(token, ms)
        if next_inbox and next_inbox ~= inbox then
          push(next_inbox, next_id .. ' 0 ' .. digits .. ' ' .. ms)
        end
        return GRANTED
      end
    end
    first = heads()
  end
end
