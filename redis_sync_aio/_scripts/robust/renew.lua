-- Let the lease of a robust lock end ttl milliseconds from now, if its token still holds the lock;
-- its record lasts a week longer.
-- KEYS   name, queue, fence, polls, record
-- ARGV   1 token  2 ttl_ms
-- REPLY  {Renewed: GONE, RENEWED or TAKEN, server time in us}
-- REPLAY Sets the same remaining times again.
-- COST   as lock/renew.lua; PEXPIRE is allowed when the server is out of memory
-- include: lock_keys
-- include: lock_queue
-- include: robust_record
local holder, ttl = redis.call('GET', NAME), ARGV[2]
-- include: lock_check_owner
-- include: lock_extend
if redis.pcall('HMGET', RECORD, 'token')[1] == holder then
  redis.call('PEXPIRE', RECORD, record_ttl(ttl))
end
return {Renewed.RENEWED, now}
