if holder ~= ARGV[1] then
  if holder then return {2, now} end
  settle('', heads())
  return {0, now}
end
