-- The end of an acquire: returns BUSY, or QUEUED with a place.
-- Needs `holder` and `last` (NAME and FENCE), and `settled`: tickets were taken out since `tail` was read.
local left, soon = redis.call('PTTL', NAME), 1
if holder and last and string.sub(last, 18) == holder then soon = 0 end
if ticket == '' then return {0, 0, left, now, soon} end
local place, perhaps_new = (tail or 0) + 1, not tail or settled
-- include: ticket_insert
if holder then wanted(holder) end
return {2, new, left, now, soon}
