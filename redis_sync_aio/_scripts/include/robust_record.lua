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
local function record_ttl(ms) -- a week longer than the fence is remembered
  return string.format('%.0f', WEEK_MS + remember(ms))
end
