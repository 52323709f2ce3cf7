-- Look at the permits of a name. Changes nothing.
-- KEYS   permits, state, queue, polls
-- ARGV   1 how many permits and tickets to show
-- REPLY  {limit (0 = none), used, last fence (0 = none), number of tickets, the first tickets,
--        {token, weight, fence, ms left} of the first permits}: fences as text
-- REPLAY Reads only.
-- COST   O(log permits + permits and tickets shown + tombstones among those + expired permits)
local PERMITS, STATE, QUEUE = KEYS[1], KEYS[2], KEYS[3]
local field = '=' .. ARGV[1] -- no token of ours; permit_state wants one
-- include: permit_state
-- include: permit_lookup
local live, shown, from = {}, tonumber(ARGV[1]), 0
for _, token in ipairs(redis.call('ZRANGEBYSCORE', PERMITS, '-inf', now)) do
  used = used - (permit(token) or 0)
end
local after = '(' .. string.format('%.0f', now)
while #live < shown do
  local found = redis.call('ZRANGEBYSCORE', PERMITS, after, '+inf', 'WITHSCORES',
    'LIMIT', from, shown)
  for i = 1, #found, 2 do
    local weight, its_fence = permit(found[i])
    if weight and weight > 0 and #live < shown then
      local ms = math.ceil((tonumber(found[i + 1]) - now) / 1000)
      live[#live + 1] = {found[i], weight, its_fence, ms}
    end
  end
  from = from + shown
  if #found < 2 * shown then break end
end
if not redis.call('ZRANGE', PERMITS, 0, 0)[1] then used = 0 end -- PERMITS was lost (evicted)
local tickets = redis.call('ZRANGEBYSCORE', QUEUE, '-inf', '+inf', 'LIMIT', 0, shown)
return {limit, used, state[3] or '0', redis.call('ZCARD', QUEUE), tickets, live}
