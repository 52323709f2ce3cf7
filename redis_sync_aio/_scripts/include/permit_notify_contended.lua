-- Tell a sharing process that its permit is contended. Included after `permit_queue`.
local function notify_contended(token)
  local inbox, id = sharer(token)
  if inbox then tell(inbox, id, CONTENDED, 0) end
end
