-- Return the reply if an acquire needs no permit or cannot have one: OWN, SPENT, MISMATCH,
-- TOO_HEAVY. Needs `had` and `its_fence` (the permit of the token), `differs` and `resized`.
if limit == 0 or differs or had or weight > math.abs(limit) then
  if waits(ticket) then
    leave(ticket)
    settle('')
    had, its_fence = permit(token)
  end
  save()
  if had == 0 then return {Outcome.SPENT, 0, FOREVER_MS, now, 0} end
  if had then
    local ends_in, _, _, before = left(redis.call('ZSCORE', PERMITS, token)), permit(token)
    return {Outcome.OWN, tonumber(its_fence), ends_in, now, had, tonumber(before)}
  end
  local code = (limit == 0 or differs) and Outcome.MISMATCH or Outcome.TOO_HEAVY
  return {code, limit, FOREVER_MS, now, differs and resized and 1 or 0}
end
