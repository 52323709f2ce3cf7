-- Shared by what reads and writes the record of a robust lock. It says how far the work of a holder has come, and
-- outlives the holder if that ends without a release. Fields: token and fence (whose it is), at (server time in us of
-- the last word), before ('fence at token' of the record found at its grant, until it records something itself; or ''),
-- writers (ids of the leases that adopted it since that grant, divided by spaces; only the last one may write),
-- seq (of its last word), progress and undo (JSON; not read on the server; inherited until overwritten; '' = none).
local RECORD = KEYS[5]
local function record_ttl(ms) -- a week longer than it needs
  return string.format('%.0f', 604800000 + remember(ms))
end
-- The same identity may hold the lock again, under another fence: a late copy of a command is about a lease that is over.
local function outdated(token, fence)
  local last = redis.call('GET', FENCE)
  return last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence
end
-- Return the fields in the order given above, or nil and the error for what was not written by us. Changes nothing.
local function read_record()
  local found = redis.call('HMGET', RECORD, 'token', 'fence', 'at', 'before', 'writers', 'seq', 'progress', 'undo')
  local function number(text, least, most)
    return text and #text >= least and #text <= most and string.match(text, '^%d+$')
  end
  if found[1] and not (number(found[2], 16, 16) and number(found[3], 16, 16) and number(found[6], 1, 15)) then
    return nil, redis.error_reply('WRONGTYPE the record of this lock is not one of ours: delete ' .. RECORD)
  end
  return found
end
