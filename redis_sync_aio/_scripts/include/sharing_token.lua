-- The token of a process whose tasks share a lease, 'host:pid:inbox:number', ends with
-- SHARING_MARK. A grant reserves FENCE_RANGE fences for it, one for each task that uses the lease
-- in turn, and it is notified when the lease is contended. With a prefix of keys and inboxes, the
-- token is 'host:pid:prefix' .. 'inbox:number'. A label before that ends with LABEL_MARK. Returns
-- the inbox and the number.
local function sharer(token)
  if string.sub(token, -1) == 'SHARING_MARK' then
    local before, inbox, id = string.match(token, '^(.*:)(%x+):(%d+)SHARING_MARK$')
    if not before then return end
    before = string.gsub(before, '^.*LABEL_MARK', '')
    return (string.match(before, '^[^:]*:%d+:(.*)$') or '') .. 'INBOX_PREFIX' .. inbox, id
  end
end
