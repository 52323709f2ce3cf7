-- The queue of a lock: granting it to the tickets in their order, and notifying their owners.
-- Runs no command but TIME until one of its functions is called.
-- A ticket is 'inbox|id|claim_ms|weight|token': where to push the grant ('' = its owner polls), the
-- number of the ticket there, the first duration of the grant (0 = forever), the weight (of a lock:
-- 1), and the token that becomes the holder. TICKET and PUSHED_TICKET are patterns for it.
-- A message to an inbox is 'id fence time ms', and more after a grant; in place of the fence it may
-- have 0 (you are next: look in ms), ASK_AGAIN or CONTENDED.
-- include: publish
local GRANTED, RESERVED, FREE, LATER = 1, 2, 3, 4
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local digits = clock[1] .. string.sub('00000' .. clock[2], -6) -- as text: 16 digits until 2286
-- include: later_layout

-- P8: a hybrid clock. Returns, as text, a fence above every earlier one, even if the stored fence
-- was lost. Of a range the first fence is returned and the last one is stored. It is `least` (text)
-- if that is ahead of the clock, but not far.
local function next_fence(token, ms, range, least)
  local fence, keep, more = digits, remember(ms), (range or fences_of(token)) - 1
  if least and least > fence and least - fence <= APART_US then fence = least end
  local function upto() return more == 0 and fence or string.format('%.0f', fence + more) end
  local last = redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep, 'GET')
  if last and string.byte(last, 17) ~= 32 then -- not ours: restore it, but for its ttl
    redis.call('SET', FENCE, last)
    error('WRONGTYPE ' .. FENCE .. ' NOT_OURS: it is no fence', 0)
  end
  if last and string.sub(last, 1, 16) >= fence then -- the clock stood still, or went back
    fence = string.format('%.0f', tonumber(string.sub(last, 1, 16)) + 1)
    keep = keep + math.floor((fence - now) / 1000) -- until the clock has caught up
    redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep)
  end
  return fence
end

local function hold(token, ms)
  if ms == '0' then redis.call('SET', NAME, token) else redis.call('SET', NAME, token, 'PX', ms) end
end

local function heads() return redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES') end

-- Give NAME to the first living ticket ahead of `mine`; `first` is what heads() returned.
-- GRANTED: it has a holder now. RESERVED: the next waiter polls and is alive; NAME is its to take.
-- LATER: the same, of a later layout. FREE: no ticket is ahead of `mine`.
-- The ticket goes first: ZREM is allowed when the server is out of memory, and after one write of a
-- script the server allows the others. PUBLISH comes before SET: without a listener the waiter is
-- gone. The one after it gets a note of how long the new holder has the lock: it looks then, if
-- nothing wakes it before.
local function settle(mine, first)
  for _ = 1, MAX_DEAD do
    local ticket, place, following = first[1], first[2], first[3]
    if not ticket or ticket == mine then return FREE end
    local inbox, id, ms, _, token = string.match(ticket, 'TICKET')
    if not inbox and lives(ticket) then return LATER end
    if not inbox or inbox == '' then
      local alive = inbox and redis.call('ZSCORE', POLLS, ticket)
      if alive and tonumber(alive) * 1000 > now then return RESERVED end
      redis.call('ZREM', QUEUE, ticket)
      redis.call('ZREM', POLLS, ticket)
    else
      redis.call('ZREM', QUEUE, ticket)
      local next_inbox, next_id = string.match(following or '', 'PUSHED_TICKET')
      local grant = id .. ' ' .. next_fence(token, ms) .. ' ' .. digits .. ' ' .. ms
      if following then -- the number of the next ticket of the same inbox; 0: of another one
        grant = grant .. ' ' .. (next_inbox == inbox and next_id or 0) .. ' ' .. ms
      end
      local heard = publish(inbox, grant, true)
      if type(heard) == 'table' then -- PUBLISH was refused: the owner finds the reserved lock later
        redis.call('ZADD', QUEUE, place, ticket)
        redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
        return RESERVED
      end
      if heard > 0 then
        hold(token, ms)
        if next_inbox and next_inbox ~= inbox then
          publish(next_inbox, next_id .. ' 0 ' .. digits .. ' ' .. ms)
        end
        return GRANTED
      end
    end
    first = heads()
  end
  return RESERVED -- so many were dead: the next request drops more
end
