-- Record how far the work under a robust lock has come, if its lease still holds; renew the lease.
-- KEYS   name, queue, fence, polls, record
-- ARGV   1 token  2 fence  3 ttl_ms of the renewal (0 = keep the remaining time)  4 ttl_ms of the
--        lease  5 seq: rises with each record of a lease  6 progress  7 undo: both are text that is
--        not read here ('' = none)  8 writer: the id under which the lease adopted the record
-- REPLY  {Renewed, server time in us}: GONE, RENEWED (recorded), TAKEN, or SUPERSEDED (a later
--        lease of the identity writes the record)
-- REPLAY Sets the same remaining time again and records the same. A copy that arrives after a later
--        record (its seq is less), or after another grant to or adoption by the identity, changes
--        nothing.
-- COST   as lock/renew.lua. The first write is one that is allowed when the server is out of memory
-- include: robust_record
local ttl = ARGV[3]
-- No writer: it is of another grant, or was evicted. The first lease that comes writes all of it.
if writers ~= '' and latest ~= ARGV[8] then return {Renewed.SUPERSEDED, now} end
if ttl ~= '0' then
-- include: lock_extend
end
if same and tonumber(found[6]) > tonumber(ARGV[5]) then return {Renewed.RENEWED, now} end
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[4]))
redis.call('HSET', RECORD, 'token', token, 'fence', fence, 'at', string.format('%.0f', now),
  'before', '', 'writers', writers == '' and ARGV[8] or writers, 'seq', ARGV[5],
  'progress', ARGV[6], 'undo', ARGV[7])
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[4]))
return {Renewed.RENEWED, now}
