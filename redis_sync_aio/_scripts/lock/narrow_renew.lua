-- Renew a lease while its hash slot moves to another node, where a script is refused that declares
-- a missing key. Nobody in the queue is notified.
-- KEYS   name
-- ARGV   as lock/renew.lua
-- REPLY  as lock/renew.lua, with no fences and nobody waiting: neither can be looked up
-- REPLAY Sets the same remaining time again.
-- COST   O(1); PEXPIRE is allowed when the server is out of memory
local holder, clock = redis.call('GET', KEYS[1]), redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if holder ~= ARGV[1] then return {holder and Renewed.TAKEN or Renewed.GONE, now} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] then return {Renewed.RENEWED, now, 0, 0} end
return {Renewed.RENEWED, now}
