-- Let a lease end ttl milliseconds from now, if it is still ours.
-- KEYS  name, queue, fence, polls
-- ARGV  1 token  2 ttl_ms  3 by a process that shares its lease: how many fences more it needs; 0: none
-- NARROW lock/narrow_renew 1
-- REPLY {0 GONE | 1 RENEWED | 2 TAKEN, server time in us}, with ARGV[3] also the first of those fences, and whether
--       somebody waits
-- REPLAY  Sets the same remaining time again; reserves other fences.
-- COST  O(1), O(log waiters) if it ends sooner than before, as release if nobody holds it any more; PEXPIRE is allowed
--       when the server is out of memory
-- include: lock_keys
-- include: lock_queue
local holder, ttl = redis.call('GET', NAME), ARGV[2]
-- include: lock_check_owner
-- include: lock_extend
if not ARGV[3] then return {1, now} end
local first = ARGV[3] == '0' and 0 or next_fence(holder, ttl, ARGV[3])
return {1, now, tonumber(first), redis.call('ZCARD', QUEUE) > 0 and 1 or 0}
