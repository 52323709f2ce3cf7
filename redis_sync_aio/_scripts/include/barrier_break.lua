-- Breaking a barrier, or resetting it. Included after `permit_setup`.
-- The limit of a barrier is minus the number of parties; it is above 0 while the barrier is broken.
-- There are no tickets then, so `settle` grants nothing.
-- include: permit_tombstone

-- Take all parties out of the queue. Each but `mine` finds a tombstone, which says BROKEN.
local function send_away(mine, new_limit)
  for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
    leave(member)
    local inbox, id, _, _, whose = string.match(member, 'TICKET')
    if whose and member ~= mine then
      leave_tombstone(whose)
      if inbox ~= '' then tell(inbox, id, ASK_AGAIN, 0) end
    end
  end
  limit = new_limit
  redis.call('HSET', STATE, 'limit', limit, 'used', used)
  keep(DAY_MS, false)
end
