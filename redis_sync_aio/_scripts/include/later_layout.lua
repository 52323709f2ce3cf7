-- A ticket of a later layout, which TICKET does not match, is granted by the scripts of its owner.
-- Returns whether that lives; it is told to ask again, and has LATER_MS for it. Every layout keeps
-- this: a ticket begins with 'inbox|number|', from layout 2 on with 'inbox|layout;number|'; what 0
-- and ASK_AGAIN mean in messages; POLLS may bound a ticket. Included after `publish` and `digits`.
local function lives(ticket)
  local inbox, id = string.match(ticket, 'PUSHED_TICKET')
  local ends = redis.call('ZSCORE', POLLS, ticket)
  if inbox and publish(inbox, id .. ' ASK_AGAIN ' .. digits .. ' 0', true) == 0 then return end
  if ends or not inbox then return (ends or 0) * 1000 > now end
  redis.pcall('ZADD', POLLS, math.floor(now / 1000) + LATER_MS, ticket)
  redis.pcall('PEXPIRE', POLLS, QUEUE_TTL_MS)
  return true
end
