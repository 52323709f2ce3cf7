-- Release a permit while its hash slot moves to another node, where a script is refused that
-- declares a missing key. Waiters find what is free when they ask again.
-- KEYS   permits, state
-- ARGV   as permits/release.lua
-- REPLY  as permits/release.lua; TRYAGAIN if a ticket has to be withdrawn, or a token remembered
-- REPLAY as permits/release.lua
-- COST   O(log permits)
if ARGV[2] ~= '' or ARGV[3] == '1' then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
-- include: permit_narrow_setup
if not had or had == 0 or until_then <= now then return Released.GONE end
redis.call('ZREM', PERMITS, ARGV[1]) -- first: allowed when out of memory, and then so is the rest
redis.call('HDEL', STATE, field)
redis.call('HSET', STATE, 'used', used - had)
return Released.RELEASED
