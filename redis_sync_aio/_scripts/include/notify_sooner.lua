-- Notify the first waiter that something is free in ms, sooner than expected; or the second one, if
-- no client listens at the inbox of the first. Included after `lock_queue` or `permit_queue`.
local function notify_sooner(ms)
  for _, ticket in ipairs(redis.call('ZRANGE', QUEUE, 0, SOONER_TRIES - 1)) do
    local inbox, id = string.match(ticket, 'PUSHED_TICKET')
    if inbox and publish(inbox, id .. ' 0 ' .. digits .. ' ' .. ms, true) ~= 0 then return end
  end
end
