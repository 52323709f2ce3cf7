-- Accept a fence unless a higher one was accepted before; or only look.
-- KEYS   gate
-- ARGV   1 fence, 16 digits ('' = only look)  2 ttl_ms
-- REPLY  the highest fence accepted, 16 digits ('' = none): accepted if it is the one in ARGV[1]
-- REPLAY The same fence is accepted again, unless a higher one came in between: then it is refused
--        like any late fence.
-- COST   O(1)
local highest, fence = redis.call('GET', KEYS[1]) or '', ARGV[1]
if highest ~= '' and not (#highest == 16 and string.match(highest, '^%d+$')) then
  return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' NOT_OURS: it is no fence')
end
-- Compared as text: numbers would be rounded from 2^53 on. '' is less than any fence.
if highest > fence then return highest end
if highest == fence then redis.call('PEXPIRE', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], fence, 'PX', ARGV[2]) end
return fence
