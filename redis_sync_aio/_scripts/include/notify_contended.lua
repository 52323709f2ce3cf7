-- Tell a sharing process that its lease is contended. Included after `lock_queue`, `permit_queue`.
local function notify_contended(token)
  local inbox, id = sharer(token)
  if inbox then publish(inbox, id .. ' CONTENDED ' .. digits .. ' 0') end
end
