-- Accept a fence that is not older than the highest one accepted so far; or look.
-- KEYS  gate
-- ARGV  1 fence, 16 digits ('' = only look)  2 ttl_ms
-- REPLY the highest fence accepted, 16 digits ('' = none): accepted if that is the one asked about
-- REPLAY  The same fence is accepted again, unless a higher one came in between: then it is refused, as any late one.
-- COST  O(1)
local highest, fence = redis.call('GET', KEYS[1]) or '', ARGV[1]
if highest ~= '' and not (#highest == 16 and string.match(highest, '^%d+$')) then
  return redis.error_reply('WRONGTYPE the key of this gate holds something that is not a fence')
end
if highest > fence then return highest end -- as text: numbers would be rounded from 2^53 on; '' is less than any
if highest == fence then redis.call('PEXPIRE', KEYS[1], ARGV[2]) else redis.call('SET', KEYS[1], fence, 'PX', ARGV[2]) end
return fence
