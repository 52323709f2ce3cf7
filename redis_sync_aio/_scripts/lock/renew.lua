-- Let a lease end ttl milliseconds from now, if its token still holds the lock. The record of a
-- robust lock lasts a week longer.
-- KEYS   name, queue, fence, polls; of a robust lock also its record
-- ARGV   1 token  2 ttl_ms  3 only from a sharing process: how many more fences it needs (0 = none)
-- REPLY  {Renewed: GONE, RENEWED or TAKEN, server time in us}; RENEWED with ARGV[3] also returns
--        the first of those fences (0 = none), and 1 if a ticket waits, else 0
-- REPLAY Sets the same remaining time again; reserves other fences.
-- COST   O(1); O(log waiters) if the lease ends sooner than before; as lock/release.lua if the
--        lock is not held. PEXPIRE is allowed when the server is out of memory
-- include: lock_keys
-- include: lock_queue
local holder, ttl, record = redis.call('GET', NAME), ARGV[2], KEYS[5]
-- include: lock_check_owner
-- include: lock_extend
if record and redis.pcall('HMGET', record, 'token')[1] == holder then
  redis.call('PEXPIRE', record, WEEK_MS + remember(ttl))
end
if not ARGV[3] then return {Renewed.RENEWED, now} end
local first = ARGV[3] == '0' and 0 or next_fence(holder, ttl, ARGV[3])
return {Renewed.RENEWED, now, tonumber(first), redis.call('ZCARD', QUEUE) > 0 and 1 or 0}
