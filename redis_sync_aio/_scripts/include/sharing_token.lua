-- A process whose tasks share a lease marks its token, 'host:pid:inbox:number~': a grant reserves
-- FENCE_RANGE fences for it, one for each task that uses the lease in turn, and it is notified when
-- the lease is contended. Returns inbox and number of such a token.
local function sharer(token)
  if string.byte(token, -1) == SHARING_MARK then return string.match(token, ':(%x+):(%d+)~$') end
end
