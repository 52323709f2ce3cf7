-- Let a lease end ttl milliseconds from now, if it is still ours.
-- KEYS  name, queue, fence, polls
-- ARGV  1 token  2 ttl_ms
-- REPLY {0 GONE | 1 RENEWED | 2 TAKEN, server time in us}
-- REPLAY  Sets the same remaining time again.
-- COST  O(1); PEXPIRE is allowed when the server is out of memory
-- include: keys
-- include: lock
local holder = redis.call('GET', NAME)
if holder == ARGV[1] then
  redis.call('PEXPIRE', NAME, ARGV[2])
  local keep = remember(ARGV[2])
  if redis.call('PTTL', FENCE) < keep then redis.call('PEXPIRE', FENCE, keep) end
  return {1, now}
end
if holder then return {2, now} end
settle('', heads())
return {0, now}
