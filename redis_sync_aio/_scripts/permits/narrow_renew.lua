-- Renew a permit while its hash slot moves to another node, where a script is refused that declares
-- a missing key. Nobody in the queue is granted or told anything.
-- KEYS   permits, state
-- ARGV   as permits/renew.lua
-- REPLY  as permits/renew.lua, with no fences and nobody waiting: neither can be looked up
-- REPLAY Sets the same remaining time again.
-- COST   O(log permits)
-- include: permit_narrow_setup
-- include: permit_lasts
-- include: permit_keep
local ms = tonumber(ARGV[2])
if not had or had < tonumber(ARGV[3]) or until_then <= now then return {Renewed.GONE, now} end
keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then so is ZADD
redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])
if ARGV[4] then return {Renewed.RENEWED, now, 0, 0} end
return {Renewed.RENEWED, now}
