-- Let the lease of a lock end ttl milliseconds from now, if it is still ours; nobody in the queue hears of it.
-- For a hash slot that is being moved, where a script is refused that declares a key that does not exist.
-- KEYS  name
-- ARGV  as lock/renew.lua
-- REPLY as lock/renew.lua; no fences, and that nobody waits: neither can be looked up
-- REPLAY  Sets the same remaining time again.
-- COST  O(1); PEXPIRE is allowed when the server is out of memory
local holder, clock = redis.call('GET', KEYS[1]), redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if holder ~= ARGV[1] then return {holder and 2 or 0, now} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] then return {1, now, 0, 0} end
return {1, now}
