-- Read the mark next to a lock, and change it if the lease holds.
-- KEYS   name, mark
-- ARGV   1 token ('' = only read, with any holder)  2 new text (absent: only read)
--        3 ms that it lasts  4 text to replace ('' = none; absent: whatever there is)
-- REPLY  {Renewed, text found}: GONE, TAKEN (nothing was changed), RENEWED (the lease holds)
-- REPLAY With 4, a copy finds another text and changes nothing; without, it writes the same text.
--        A copy that arrives after the lease changes nothing.
-- COST   O(1). The first write is one that is allowed when the server is out of memory
local found, token = redis.call('GET', KEYS[2]), ARGV[1]
local holder = token ~= '' and redis.call('GET', KEYS[1])
if token ~= '' and holder ~= token then
  return {holder and Renewed.TAKEN or Renewed.GONE, found}
end
if ARGV[2] and (not ARGV[4] or ARGV[4] == (found or '')) then
  redis.call('DEL', KEYS[2])
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return {Renewed.RENEWED, found}
