-- Release a lock while its hash slot moves to another node, where a script is refused that declares
-- a missing key. Waiters find the lock free when they ask again.
-- KEYS   name
-- ARGV   as lock/release.lua, or as robust/release.lua of a lease that never adopted the record
-- REPLY  as lock/release.lua; TRYAGAIN if a ticket has to be withdrawn, a token remembered, or a
--        record ended
-- REPLAY as lock/release.lua
-- COST   O(1)
if ARGV[2] ~= '' or ARGV[3] == '1' or (ARGV[5] and ARGV[4] ~= '') then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return Released.TAKEN end
return redis.call('DEL', KEYS[1])
