-- A waiter of the usual kind: woken by a push, not heavier than the limit, and with a token of his own, made of his inbox
-- and the number of his ticket, so that it holds nothing yet. Returns inbox, number, ms, weight and token; nil of others.
local function usual(ticket)
  local its = '^rsa:(%x+)|(%d+)|(%d+)|(%d+)|(.*:(%x+):(%d+))$'
  local inbox, id, ms, weight, token, own_inbox, own_id = string.match(ticket or '', its)
  if own_id == id and own_inbox == inbox and inbox and weight + 0 <= limit then
    return 'rsa:' .. inbox, id, ms, weight, token
  end
end
