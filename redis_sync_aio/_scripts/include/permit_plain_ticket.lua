-- A plain ticket: woken by a push, not heavier than the limit, and with a token made of its inbox
-- and its number, so that the token holds nothing yet. Returns inbox, number, ms, weight and token;
-- nil for any other ticket.
local function plain_ticket(ticket)
  local inbox, id, ms, weight, token = string.match(ticket or '', 'PLAIN_TICKET')
  -- Compared: if the pattern matched this as well, it would take twice the time.
  local own = inbox and ':' .. inbox .. ':' .. id
  if own and string.sub(ticket, -#own) == own and weight + 0 <= limit then
    return 'INBOX_PREFIX' .. inbox, id, ms, weight, string.sub(ticket, token)
  end
end
