-- Whose limit counts when the caller comes with another one than the server's. The caller's, if it says 'set', or when
-- nobody holds or waits: those who acquire only imply a limit. The server's, if it says 'keep'. A limit that resize has
-- set stays. Needs what `settle` returned, and `permit` of the token. It still `differs`: the request is refused.
local differs = asked > 0 and asked ~= limit and not waits(ticket)
local resized = differs and redis.call('HGET', STATE, 'resized')
if differs and not resized and (ARGV[7] == 'set' or used == 0 and turn == FREE) then
  limit, differs = asked, false
  redis.call('HSET', STATE, 'limit', limit)
  turn, more = settle(ticket)
  had, its_fence = permit(token)
end
differs = differs and ARGV[7] ~= 'keep'
