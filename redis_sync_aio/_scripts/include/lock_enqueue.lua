-- The end of an acquire: return BUSY, or QUEUED with a place in the queue.
-- Needs `holder` and `last` (NAME and FENCE), `back`, and `settled`: what `settle` returned if it
-- was called. If FENCE does not name the holder, no release will wake us: look soon.
local left, look = redis.call('PTTL', NAME), settled == LATER and Look.LATER or Look.SOON
if holder and last and string.sub(last, 18) == holder then look = Look.NONE end
if ticket == '' then return {Outcome.BUSY, 0, left, now, look} end
local most, ends_in = ARGV[6], left
-- include: queue_limit
local place, perhaps_new = math.max((tail or 0) + 1, now), not tail or settled
-- include: ticket_insert
if holder then notify_contended(holder) end
return {Outcome.QUEUED, back and 1 or new, left, now, look}
