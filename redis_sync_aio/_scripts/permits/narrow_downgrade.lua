-- Let the writer be a reader again; those that wait find that out when they ask again.
-- For a hash slot that is being moved, where a script is refused that declares a key that does not exist.
-- KEYS  permits, state
-- ARGV  as permits/downgrade.lua
-- REPLY as permits/downgrade.lua; TRYAGAIN if a ticket is to be withdrawn, or an attempt remembered
-- REPLAY  as permits/downgrade.lua
-- COST  O(log permits)
if ARGV[2] ~= '' or ARGV[3] == '1' then
  return redis.error_reply('TRYAGAIN the hash slot is being moved to another node')
end
local PERMITS, STATE, WHOLE = KEYS[1], KEYS[2], 2147483647
local field, soonest = '=' .. ARGV[1], nil
-- include: permit_state
-- include: permit_hold
local until_then = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]) or 0)
local had, its_fence, attempt = permit(ARGV[1])
if not had or had == 0 or until_then <= now then return 0 end
if had > 1 and attempt == (ARGV[4] or '') then
  keep(0, true) -- first: PEXPIRE is allowed when out of memory, and then HSET is, too
  redis.call('HSET', STATE, 'used', used - had + 1, '=' .. ARGV[1], '1 ' .. its_fence)
end
return 1
