-- Tell a sharing process that its lock is contended: if a ticket waits, or `anyway`. Included after
-- `lock_queue`.
local function notify_contended(holder, anyway)
  local inbox, id = sharer(holder)
  if inbox and (anyway or redis.call('ZCARD', QUEUE) > 0) then
    publish(inbox, id .. ' CONTENDED ' .. digits .. ' 0')
  end
end
