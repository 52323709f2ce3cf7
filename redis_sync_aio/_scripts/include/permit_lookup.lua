-- Included after `permit_state`.

-- Return weight, fence (text) and, of a writer, the previous fence (text) of a token's permit; nil
-- if there is none.
local function permit(token)
  local found = token == ARGV[1] and own or redis.call('HGET', STATE, '=' .. token) or ''
  local weight, its_fence, previous = string.match(found, '^(%d+) (%d+) ?(%d*)$')
  return tonumber(weight), its_fence, previous
end
