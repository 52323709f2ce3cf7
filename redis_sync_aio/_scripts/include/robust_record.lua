-- Read the record of a robust lock if ARGV[1] holds the lock under the fence ARGV[2]; else return.
-- It says how far the work of a holder has come, and outlives the holder if that ends without a
-- release. Fields:
--   token, fence     whose record it is
--   at               server time in us of its last write
--   before           'fence at token' of the record found at the grant, until this lease records
--                    something itself; or ''
--   writers          ids of the leases that adopted it since that grant, separated by spaces; only
--                    the last one may write
--   seq              of its last write
--   progress, undo   JSON that is not read here; inherited until overwritten; '' = none
-- Sets `found`: the fields in this order; `same`: whether it is the record of this grant; and then
-- `writers`, and `latest` of them.
-- include: lock_keys
-- include: lock_queue
local RECORD, token, fence, holder = KEYS[5], ARGV[1], ARGV[2], redis.call('GET', NAME)
-- include: lock_check_owner
local last = redis.call('GET', FENCE)
if last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence then
  return {Renewed.TAKEN, now} -- a late copy: the same identity holds the lock again
end

local function record_ttl(ms) return WEEK_MS + remember(ms) end -- longer than the fence

local function number(text, least, most)
  return text and #text >= least and #text <= most and string.match(text, '^%d+$')
end

local found = redis.call('HMGET', RECORD, 'token', 'fence', 'at', 'before', 'writers', 'seq',
  'progress', 'undo')
local sound = number(found[2], 16, 16) and number(found[3], 16, 16) and number(found[6], 1, 15)
if found[1] and not sound or not found[1] and redis.call('PTTL', RECORD) ~= FREE_MS then
  return redis.error_reply('WRONGTYPE ' .. RECORD .. ' NOT_OURS: it is no record')
end
local same = found[1] == token and found[2] == fence
local writers = same and found[5] or ''
local latest = string.match(writers, '%S*$')
