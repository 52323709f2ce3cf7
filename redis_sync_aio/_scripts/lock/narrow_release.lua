-- Give up a lock; those that wait for it find that out when they ask again.
-- For a hash slot that is being moved, where a script is refused that declares a key that does not exist.
-- KEYS  name
-- ARGV  as lock/release.lua, or as robust/release.lua of a lease that never adopted the record
-- REPLY as lock/release.lua; TRYAGAIN if a ticket is to be withdrawn, a token remembered, or a record ended
-- REPLAY  as lock/release.lua
-- COST  O(1)
if ARGV[2] ~= '' or ARGV[3] == '1' or (ARGV[5] and ARGV[4] ~= '') then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 2 end
return redis.call('DEL', KEYS[1])
