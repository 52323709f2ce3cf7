-- Look at the permits of a name. Changes nothing.
-- KEYS  permits, state, queue, polls
-- ARGV  1 how many permits and tickets to show
-- REPLY {limit (0 = none), used, last fence (0 = none), number of tickets, the first tickets,
--        {token, weight, fence, ms left} of the first permits}: fences as text
-- REPLAY  Reads only.
-- COST  O(log permits + permits and tickets shown + tombstones among those + permits that are over)
-- include: permit_setup
-- include: permit_hold
local live, shown, from = {}, tonumber(ARGV[1]), 0
for _, token in ipairs(redis.call('ZRANGEBYSCORE', PERMITS, '-inf', now)) do used = used - (permit(token) or 0) end
local after = '(' .. string.format('%.0f', now)
while #live < shown do
  local found = redis.call('ZRANGEBYSCORE', PERMITS, after, '+inf', 'WITHSCORES', 'LIMIT', from, shown)
  for i = 1, #found, 2 do
    local weight, its_fence = permit(found[i])
    if weight and weight > 0 and #live < shown then
      live[#live + 1] = {found[i], weight, its_fence, math.ceil((tonumber(found[i + 1]) - now) / 1000)}
    end
  end
  from = from + shown
  if #found < 2 * shown then break end
end
if not soonest then used = 0 end -- PERMITS was lost (evicted)
local tickets = redis.call('ZRANGEBYSCORE', QUEUE, '-inf', '+inf', 'LIMIT', 0, shown)
return {limit, used, state[3] or '0', redis.call('ZCARD', QUEUE), tickets, live}
