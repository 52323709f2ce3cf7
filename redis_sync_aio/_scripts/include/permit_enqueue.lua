-- The end of an acquire: returns BUSY, or QUEUED with a place. Needs `turn` and `more`: what `settle` returned.
-- When to look again: 1 soon, as nobody wakes it; 2 from time to time: there is room behind the first, who may die.
local look = left() or -1
local soon = turn == RESERVED and not more and 1 or turn == FULL and used < limit and not ahead and 2 or 0
if turn == RESERVED and more and (look < 0 or more < look) then look = math.max(1, math.ceil(more)) end
if ticket == '' then return {0, 0, look, now, soon} end
local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
local place, perhaps_new = ahead or (tail or 0) + 1, not tail
-- include: ticket_insert
-- Tell those who share what they hold, each process once. `shared` is read only here: where it is missing among many
-- permits that takes time, which those who do not wait need not spend.
if redis.call('HGET', STATE, 'shared') then
  local told = {}
  for _, holder in ipairs(redis.call('ZRANGE', PERMITS, 0, 63)) do
    local inbox = sharer(holder)
    if inbox and not told[inbox] and permit(holder) ~= 0 then
      told[inbox] = true
      wanted(holder)
    end
  end
end
return {2, new, look, now, soon}
