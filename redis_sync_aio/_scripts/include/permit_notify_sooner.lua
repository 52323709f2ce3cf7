-- Tell the first waiter when something is free; or the second one, if nobody listens at the inbox
-- of the first. Included after `permit_queue`.
local function notify_sooner()
  soonest = nil
  for _, ticket in ipairs(redis.call('ZRANGE', QUEUE, 0, SOONER_TRIES - 1)) do
    local inbox, id = string.match(ticket, 'PUSHED_TICKET')
    if inbox and tell(inbox, id, 0, left() or 1, true) then return end
  end
end
