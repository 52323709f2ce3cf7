-- Return the reply if a party needs no place, or cannot have one: OWN, BROKEN, MISMATCH.
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
