-- A waiter of the usual kind: woken by a push, not heavier than the limit, and with a token of his own, made of his inbox
-- and the number of his ticket, so that it holds nothing yet. Returns inbox, number, ms, weight and token; nil of others.
local function usual(ticket)
  local inbox, id, ms, weight, token = string.match(ticket or '', '^rsa:(%x+)|(%d+)|(%d+)|(%d+)|()')
  local own = inbox and ':' .. inbox .. ':' .. id -- compared: matched by the pattern as well it takes twice the time
  if own and string.sub(ticket, -#own) == own and weight + 0 <= limit then
    return 'rsa:' .. inbox, id, ms, weight, string.sub(ticket, token)
  end
end
