-- Return the reply if the token is no reader that may upgrade: OWN, SPENT, DEADLOCK or GONE. Sets
-- `had` and `its_fence`: its permit.
local had, its_fence, attempt = permit(token)
local spent = permit(ARGV[5])
if had == WRITER_WEIGHT or not had or had == 0 or spent then
  if ticket ~= '' then leave(ticket) end
  settle('')
  save()
  if had ~= WRITER_WEIGHT or attempt ~= ARGV[5] then
    local code = had == WRITER_WEIGHT and Outcome.DEADLOCK or Outcome.GONE
    return {spent and Outcome.SPENT or code, 0, FOREVER_MS, now, 0}
  end
  local ends_in = left(redis.call('ZSCORE', PERMITS, token))
  return {Outcome.OWN, tonumber(its_fence), ends_in, now, had}
end
