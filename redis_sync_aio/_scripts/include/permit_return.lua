-- Let a ticket that was passed over come back, and settle the queue ahead of it. Sets `turn` and
-- `more`: what `settle` returned.
local former = ARGV[9]
-- include: ticket_return
if back then first = nil end
local turn, more = settle(ticket) -- first: this may grant something to the token by another ticket
