-- Release a robust lock and end its record while its hash slot moves to another node, where a
-- script is refused that declares a missing key. Waiters find the lock free when they ask again.
-- KEYS   name, record
-- ARGV   as robust/release.lua
-- NARROW lock/narrow_release 1
-- REPLY  as lock/release.lua; TRYAGAIN if a ticket has to be withdrawn, or a token remembered
-- REPLAY as robust/release.lua
-- COST   O(1)
if ARGV[2] ~= '' or ARGV[3] == '1' then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
local holder, RECORD, writer = redis.call('GET', KEYS[1]), KEYS[2], ARGV[4]
-- include: robust_end_record
if holder and holder ~= ARGV[1] then return Released.TAKEN end
return redis.call('DEL', KEYS[1])
