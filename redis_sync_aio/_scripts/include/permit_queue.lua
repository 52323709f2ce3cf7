-- The queue of permits: granting free permits to the tickets in their order, and notifying their
-- owners. Included after `publish`, and what `permit_queries` needs.
-- Tickets and messages are those of locks: see lock_queue. The grant to a writer ends with the
-- fence of the writer before it.
-- include: permit_queries
-- include: later_layout
local RESERVED, FULL, FREE, LATER = 1, 2, 3, 4
local moved -- since the last one lined up there may be room, or another first one

-- Send a message to an inbox: a fence, 0 (look in ms), ASK_AGAIN or CONTENDED. Returns whether
-- anybody listens, which is known for certain with `counts` (see `publish`).
local function tell(inbox, id, fence_or, ms, counts)
  return publish(inbox, id .. ' ' .. fence_or .. ' ' .. digits .. ' ' .. ms, counts) ~= 0
end

-- Grant free permits to waiting tickets ahead of `mine`, in order. Returns
-- FREE      when no ticket is ahead any more, and `mine` if that is now the first;
-- FULL      when the first ticket does not fit, and is alive;
-- LATER     when the first ticket has a later layout, and is alive;
-- RESERVED  when the first ticket is polled for, and is alive; and for how many more milliseconds.
-- The ticket goes first, PUBLISH comes before the grant, and the next one gets a note when to look,
-- as for the lock. An open gate grants to all, whether they listen or poll.
local function settle(mine)
  local dead, before = 0, used
  while limit > 0 and dead < MAX_DEAD do
    first = first or redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
    local ticket, place, following = first[1], first[2], first[3]
    if not ticket or ticket == mine then return FREE, ticket end
    local inbox, id, ms, weight, token = string.match(ticket, 'TICKET')
    weight = tonumber(weight)
    if not inbox then
      if used >= limit then return FULL end
      if lives(ticket) then return LATER end
      leave(ticket)
    elseif weight > limit or (permit(token) or 0) > 0 then
      -- Too heavy since the limit was lowered; or an identity that holds already. Its owner asks
      -- again.
      leave(ticket)
      if inbox ~= '' then tell(inbox, id, ASK_AGAIN, 0) end
    elseif inbox == '' then
      local alive = redis.call('ZSCORE', POLLS, ticket)
      local lives = alive and tonumber(alive) * 1000 > now
      if lives and limit ~= OPEN_LIMIT then return RESERVED, tonumber(alive) - now / 1000 end
      leave(ticket)
      if lives then hold(token, weight, tonumber(ms), next_fence(weight)) end
    elseif not fits(weight) then -- a dead ticket must not keep out those that would fit
      if used >= limit then return FULL end
      if tell(inbox, id, 0, left() or 1, true) then
        -- Its owner may die yet, with room for others: from now on the next one looks from time to
        -- time (see permit_enqueue).
        local next_inbox, next_id = string.match(following or '', 'PUSHED_TICKET')
        if moved and next_inbox and next_inbox ~= inbox and following ~= mine then
          tell(next_inbox, next_id, ASK_AGAIN, 0)
        end
        return FULL
      end
      leave(ticket)
    else
      redis.call('ZREM', QUEUE, ticket)
      first = nil
      local its_fence = next_fence(weight)
      local next_inbox, next_id = string.match(following or '', 'PUSHED_TICKET')
      local next_left = following and math.min(left() or ms, ms)
      local grant = id .. ' ' .. its_fence .. ' ' .. digits .. ' ' .. ms
      if following then -- the number of the next ticket of the same inbox; 0: of another one
        grant = grant .. ' ' .. (next_inbox == inbox and next_id or 0) .. ' ' .. next_left
      end
      local heard = publish(inbox, grant .. previous(weight), true)
      if limit == OPEN_LIMIT then heard = 1 end -- it takes no place, and asks when it is back
      if type(heard) == 'table' then -- PUBLISH was refused: the owner finds its turn later
        redis.call('ZADD', QUEUE, place, ticket)
        redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
        return RESERVED
      end
      if heard > 0 then
        hold(token, weight, tonumber(ms), its_fence)
        if next_inbox and next_inbox ~= inbox then tell(next_inbox, next_id, 0, next_left) end
      end
    end
    moved = true
    dead, before = dead + (used == before and 1 or 0), used
  end
  if dead == MAX_DEAD then return RESERVED end -- the next request drops more
  if limit == PAUSED_LIMIT then
    first = first or redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
    if not first[1] or first[1] == mine then return FREE, first[1] end
  end
  return FULL -- paused, a closed gate, or the limit was lost with STATE: the next request brings it
end
