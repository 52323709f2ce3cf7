-- Read the record of a robust lock. Included after `robust_record`.

-- Whether `fence` is not the last one of `token`: the same identity may hold the lock again under
-- another fence, and then this is a late copy of a command about an earlier lease.
local function outdated(token, fence)
  local last = redis.call('GET', FENCE)
  return last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence
end

local function number(text, least, most)
  return text and #text >= least and #text <= most and string.match(text, '^%d+$')
end

-- Return the fields in the order of `robust_record`; or nil and an error, if the record was not
-- written by this package. Changes nothing.
local function read_record()
  local found = redis.call('HMGET', RECORD, 'token', 'fence', 'at', 'before', 'writers', 'seq',
    'progress', 'undo')
  local sound = number(found[2], 16, 16) and number(found[3], 16, 16) and number(found[6], 1, 15)
  if found[1] and not sound or not found[1] and redis.call('PTTL', RECORD) ~= FREE_MS then
    return nil, redis.error_reply('WRONGTYPE ' .. RECORD .. ' NOT_OURS: it is no record')
  end
  return found
end
