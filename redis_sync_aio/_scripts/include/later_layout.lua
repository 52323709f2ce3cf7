-- Tickets of later layouts: those that do not match TICKET. Their owners have a later version of
-- this package, whose scripts grant them what is free. So a ticket keeps its place while its owner
-- lives, and the owner is told to ask again. Every layout keeps this: a ticket begins with
-- 'inbox|number|', from layout 2 on with 'inbox|layout;number|'; 0 and ASK_AGAIN in messages mean
-- what they mean today; POLLS has until when an owner without an inbox lives.
-- Included after `publish` and `digits`.
local function lives(ticket)
  local inbox, id = string.match(ticket, 'PUSHED_TICKET')
  if inbox then return publish(inbox, id .. ' ASK_AGAIN ' .. digits .. ' 0', true) ~= 0 end
  return (redis.call('ZSCORE', POLLS, ticket) or 0) * 1000 > now
end
