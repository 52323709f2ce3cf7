-- The record of a robust lock: how far the work of a holder has come. It outlives the holder if
-- that ends without a release. Fields:
--   token, fence     whose record it is
--   at               server time in us of its last write
--   before           'fence at token' of the record found at the grant, until this lease records
--                    something itself; or ''
--   writers          ids of the leases that adopted it since that grant, separated by spaces; only
--                    the last one may write
--   seq              of its last write
--   progress, undo   JSON that is not read here; inherited until overwritten; '' = none
local RECORD = KEYS[5]
local function record_ttl(ms) return WEEK_MS + remember(ms) end -- longer than the fence

-- Whether `fence` is not the last one of `token`: the same identity may hold the lock again under
-- another fence, and then this is a late copy of a command about an earlier lease.
local function outdated(token, fence)
  local last = redis.call('GET', FENCE)
  return last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence
end

local function number(text, least, most)
  return text and #text >= least and #text <= most and string.match(text, '^%d+$')
end

-- Return the fields in their order above; or nil and an error, if the record was not written by
-- this package. Changes nothing.
local function read_record()
  local found = redis.call('HMGET', RECORD, 'token', 'fence', 'at', 'before', 'writers', 'seq',
    'progress', 'undo')
  local sound = number(found[2], 16, 16) and number(found[3], 16, 16) and number(found[6], 1, 15)
  if found[1] and not sound or not found[1] and redis.call('PTTL', RECORD) ~= FREE_MS then
    return nil, redis.error_reply('WRONGTYPE ' .. RECORD .. ' NOT_OURS: it is no record')
  end
  return found
end
