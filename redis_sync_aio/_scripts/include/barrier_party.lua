-- What a party needs to know. Returns the reply if it needs no place, or cannot have one: OWN,
-- BROKEN, MISMATCH. Keeps the parties of this process alive. Sets `alive`: whether all others are,
-- too; `lives_ms`: how long a party lives that does not ask again; `look`: in how many ms this one
-- is to ask again.
local had, its_fence = permit(token)
local present = ticket ~= '' and redis.call('ZSCORE', QUEUE, ticket)
if limit == 0 or limit < 0 and not waiting[1] then limit = -parties end
if had or limit ~= -parties or not (present or ARGV[8]) then
  if present then leave(ticket) end
  save()
  if (had or 0) > 0 then
    local ends_in = left(redis.call('ZSCORE', PERMITS, token))
    return {Outcome.OWN, tonumber(its_fence), ends_in, now, had}
  end
  local differs = limit < 0 and limit ~= -parties
  local code = differs and Outcome.MISMATCH or Outcome.BROKEN
  return {code, differs and -limit or 0, FOREVER_MS, now, limit > 0 and 1 or 0}
end

local time, lives_ms = math.floor(now / 1000), math.max(ARGV[7] + 0, ARGV[4] + 0)
local alive, look = true, math.max(1, math.floor(lives_ms / 3))
local inbox = string.match(ticket, 'PUSHED_TICKET')
-- PEXPIRE first: it is allowed when out of memory, and then so is the rest of the script.
if present then redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS) end
for _, member in ipairs(waiting) do
  if member == ticket or inbox and string.match(member, 'PUSHED_TICKET') == inbox then
    redis.call('ZADD', POLLS, time + lives_ms, member)
  else
    local rest = (redis.call('ZSCORE', POLLS, member) or 0) - time
    if rest <= 0 then alive = false end
    look = math.max(1, math.min(look, rest))
  end
end

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
