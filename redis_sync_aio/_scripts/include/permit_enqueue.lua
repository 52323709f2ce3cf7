-- The end of an acquire: return BUSY, QUEUE_FULL, or QUEUED with a place in the queue.
-- Needs `turn` and `more`: what `settle` returned; and `back`: see `ticket_return`.
-- Look.SOON: nothing will wake us. Look.IN_TIME: there is room behind the first ticket, whose owner
-- may die.
local ms, look = left() or FOREVER_MS, Look.NONE
if ARGV[8] and ticket ~= '' then
  local most, ends_in = ARGV[8], ms
-- include: queue_limit
end
if turn == RESERVED and not more then look = Look.SOON
elseif turn == FULL and used < limit then look = Look.IN_TIME
elseif turn == LATER then look = Look.LATER end
if turn == RESERVED and more and (ms < 0 or more < ms) then ms = math.max(1, math.ceil(more)) end
if ticket == '' then return {Outcome.BUSY, 0, ms, now, look} end
local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
local place, perhaps_new = math.max((tail or 0) + 1, now), not tail
-- include: ticket_insert
if limit == PAUSED_LIMIT then -- no grant writes it, or keeps it
  if state[1] ~= 'PAUSED_LIMIT' then redis.call('HSET', STATE, 'limit', limit, 'used', used) end
  keep(ttl, false)
end
-- Tell each sharing process once that its permits are contended. `shared` is read only here: where
-- it is missing among many permits, reading it takes time that requests without a wait need not
-- spend.
if redis.call('HGET', STATE, 'shared') then
  local told = {}
  for _, holder in ipairs(redis.call('ZRANGE', PERMITS, 0, MAX_NOTIFIED - 1)) do
    local inbox = sharer(holder)
    if inbox and not told[inbox] and permit(holder) ~= 0 then
      told[inbox] = true
      notify_contended(holder)
    end
  end
end
return {Outcome.QUEUED, back and 1 or new, ms, now, look}
