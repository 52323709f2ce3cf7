-- Return GONE or TAKEN unless ARGV[1] holds the lock. A free lock goes to the next waiter.
-- Needs `holder`.
if holder ~= ARGV[1] then
  if holder then return {Renewed.TAKEN, now} end
  settle('', heads())
  return {Renewed.GONE, now}
end
