-- Let a permit end ttl milliseconds from now, if its token has one; nobody in the queue gets or hears anything.
-- For a hash slot that is being moved, where a script is refused that declares a key that does not exist.
-- KEYS  permits, state
-- ARGV  as permits/renew.lua
-- REPLY as permits/renew.lua; no fences, and that nobody waits: that cannot be looked up
-- REPLAY  Sets the same remaining time again.
-- COST  O(log permits)
local PERMITS, STATE, WHOLE = KEYS[1], KEYS[2], 2147483647
local field, soonest = '=' .. ARGV[1], nil
-- include: permit_state
-- include: permit_hold
local until_then = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]) or 0)
local had, ms = permit(ARGV[1]), tonumber(ARGV[2])
if not had or had < tonumber(ARGV[3]) or until_then <= now then return {0, now} end
keep(ms, true) -- first: PEXPIRE is allowed when out of memory, and then ZADD is, too
redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])
if ARGV[4] then return {1, now, 0, 0} end
return {1, now}
