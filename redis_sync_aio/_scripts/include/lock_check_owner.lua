-- Returns GONE or TAKEN unless ARGV[1] holds the lock. If nobody does, whose turn it is gets it. Needs `holder`.
if holder ~= ARGV[1] then
  if holder then return {2, now} end
  settle('', heads())
  return {0, now}
end
