-- Give up the permit of a token; those that wait find out what is free when they ask again.
-- For a hash slot that is being moved, where a script is refused that declares a key that does not exist.
-- KEYS  permits, state
-- ARGV  as permits/release.lua
-- REPLY as permits/release.lua; TRYAGAIN if a ticket is to be withdrawn, or a token remembered
-- REPLAY  as permits/release.lua
-- COST  O(log permits)
if ARGV[2] ~= '' or ARGV[3] == '1' then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
local PERMITS, STATE, WHOLE = KEYS[1], KEYS[2], 2147483647
local field, soonest = '=' .. ARGV[1], nil
-- include: permit_state
-- include: permit_hold
local until_then = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]) or 0)
local had = permit(ARGV[1])
if not had or had == 0 or until_then <= now then return 0 end
drop(ARGV[1])
save()
return 1
