-- Whether the keys outlive a permit of `ms`, the fence `last` (if the clock went back), and a rest
-- of at least an hour. Included after `permit_state`.
local function lasts(last, ms)
  local rest = 1.25 * ms
  return kept >= (last > now and last or now) / 1000 + (rest > HOUR_MS and rest or HOUR_MS)
end
