-- Nobody waits, nothing is over or lost, and it fits.
if not first[1] and own == '' and (asked == limit or asked == 0) and used + weight <= limit then
  if not soonest and used == 0 or soonest and tonumber(soonest) > now then
    local fence_of_it = next_fence(weight)
    hold(token, weight, ttl, 0, fence_of_it)
    return tonumber(fence_of_it)
  end
end
if limit == 0 then limit = asked end
