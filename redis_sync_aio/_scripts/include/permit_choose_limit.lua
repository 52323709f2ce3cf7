-- Decide which limit counts when the caller brings another one than the server's. It is the
-- caller's if ARGV[7] is 'set', or if no permit is held and no ticket waits: acquirers only imply a
-- limit. It is the server's if ARGV[7] is 'keep'. A limit that a resize has set stays. If it still
-- `differs` the request is refused. One that has its permit sets nothing: it may be a late copy of
-- the request that got it. Needs what `settle` returned, and `permit` of the token.
local function waits(member) return member ~= '' and redis.call('ZSCORE', QUEUE, member) end

local states = asked > 0 or asked == PAUSED_LIMIT -- that of a gate is not compared
local differs = states and asked ~= limit and not waits(ticket)
local resized = differs and redis.call('HGET', STATE, 'resized')
if differs and not resized and not had and (ARGV[7] == 'set' or used == 0 and turn == FREE) then
  limit, differs = asked, false
  redis.call('HSET', STATE, 'limit', limit)
  turn, more = settle(ticket)
  had, its_fence = permit(token)
end
differs = differs and ARGV[7] ~= 'keep'
