-- Turn the writer into a reader while its hash slot moves to another node, where a script is
-- refused that declares a missing key. Waiters find what is free when they ask again.
-- KEYS   permits, state
-- ARGV   as permits/downgrade.lua
-- REPLY  as permits/downgrade.lua
-- REPLAY as permits/downgrade.lua
-- COST   O(log permits)
-- include: permit_narrow_setup
-- include: permit_lasts
-- include: permit_keep
if not had or had == 0 or until_then <= now then return Released.GONE end
if had > 1 then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then so is HSET
  redis.call('HSET', STATE, 'used', used - had + 1, '=' .. ARGV[1], '1 ' .. its_fence)
end
return Released.RELEASED
