-- Refuse an acquire that would wait behind ARGV[8] other tickets: see include/queue_limit.lua.
if ARGV[8] and ticket ~= '' then
  local most, ends_in = ARGV[8], left() or FOREVER_MS
-- include: queue_limit
end
