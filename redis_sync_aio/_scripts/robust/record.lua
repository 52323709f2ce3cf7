-- Record how far the work under a robust lock has come, if its lease is still ours, and renew that.
-- KEYS  name, queue, fence, polls, record
-- ARGV  1 token  2 fence  3 ttl_ms for the renewal (0 = leave the remaining time as it is)  4 ttl_ms of the lease
--       5 seq: greater with each record of a lease  6 progress  7 undo: both as text that is not read here, '' = none
--       8 writer: the id under which the lease adopted the record
-- REPLY {0 GONE | 1 RECORDED | 2 TAKEN | 3 SUPERSEDED: a later lease of the identity writes it, server time in us}
-- REPLAY  Sets the same remaining time again, and records the same. A copy that arrives after a later record (its seq
--       is less), or after another grant or adoption by the same identity, changes nothing.
-- COST  as renew. It begins with a write that is allowed when the server is out of memory
-- include: lock_keys
-- include: lock_queue
-- include: robust_record
local holder, token, fence, ttl = redis.call('GET', NAME), ARGV[1], ARGV[2], ARGV[3]
-- include: lock_check_owner
if outdated(token, fence) then return {2, now} end
local found, wrong = read_record() -- also if it is somebody else's key: change nothing
if wrong then return wrong end
local same = found[1] == token and found[2] == fence
local writers = same and found[5] or '' -- of another, or evicted: all of it is written, by whoever comes first
if writers ~= '' and string.match(writers, '%S*$') ~= ARGV[8] then return {3, now} end
if ttl ~= '0' then
-- include: lock_extend
end
if same and tonumber(found[6]) > tonumber(ARGV[5]) then return {1, now} end
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[4]))
redis.call('HSET', RECORD, 'token', token, 'fence', fence, 'at', string.format('%.0f', now), 'before', '',
  'writers', writers == '' and ARGV[8] or writers, 'seq', ARGV[5], 'progress', ARGV[6], 'undo', ARGV[7])
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[4]))
return {1, now}
