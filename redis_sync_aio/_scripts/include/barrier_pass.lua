-- Letting all parties pass. Included after `permit_queue`.

-- Let all of them pass, in the order in which they came. The first fence is a multiple of their
-- number, so the others tell the ranks. Returns the caller's own.
local function pass(members)
  local base, mine = math.ceil(math.max(fence + 1, now) / parties) * parties, nil
  for rank, member in ipairs(members) do
    local to, id, ms, _, whose = string.match(member, 'TICKET')
    local its_own = string.format('%.0f', base + rank - 1)
    leave(member)
    if member == ticket then
      mine, whose, ms = base + rank - 1, token, ARGV[2]
    elseif whose and to ~= '' then
      tell(to, id, its_own, ms)
    end
    if whose then hold(whose, 1, ms + 0, its_own) end
  end
  return mine
end
