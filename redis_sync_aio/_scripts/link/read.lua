-- Read several facts at one moment. Changes nothing.
-- KEYS   the keys that are read
-- ARGV   1 commands that only read, as a client sends them
-- REPLY  {TIME, the reply to each command; an error stands in its place}
-- REPLAY Reads only.
-- COST   that of the commands
local commands, at, found = ARGV[1], 1, {redis.call('TIME')}
local function number(sign)
  local _, last, digits = string.find(commands, '^' .. sign .. '(%d+)\r\n', at)
  at = last + 1
  return tonumber(digits)
end
while at <= #commands do
  local words = {}
  for n = 1, number('%*') do
    local size = number('%$')
    words[n] = string.sub(commands, at, at + size - 1)
    at = at + size + 2
  end
  found[#found + 1] = redis.pcall(unpack(words))
end
return found
