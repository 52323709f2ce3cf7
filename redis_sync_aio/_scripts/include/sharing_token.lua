-- The token of a process whose tasks share a lease, 'host:pid:inbox:number', ends with
-- SHARING_MARK. A grant reserves FENCE_RANGE fences for it, one for each task that uses the lease
-- in turn, and it is notified when the lease is contended. Returns the token's inbox and number.
local function sharer(token)
  if string.sub(token, -1) == 'SHARING_MARK' then
    return string.match(token, ':(%x+):(%d+)SHARING_MARK$')
  end
end
