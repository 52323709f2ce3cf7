-- Look, right after a grant, what the last holder of a robust lock left behind, and put our own record in its place.
-- KEYS  name, queue, fence, polls, record
-- ARGV  1 token  2 its fence  3 ttl_ms (0 = for ever)
-- REPLY {0 GONE | 2 TAKEN, server time in us}, or
--       {1 OURS, server time in us, before, seq, progress, undo}: see parts/record.lua; seq is an integer
-- REPLAY  The record says what was found, so the second run answers the same. A copy that arrives after the
--       release, or after another grant to the same identity, changes nothing.
-- COST  as renew. It begins with a write that is allowed when the server is out of memory: who was handed the lock gets it
-- include: keys
-- include: lock
-- include: record
local holder, token, fence = redis.call('GET', NAME), ARGV[1], ARGV[2]
-- include: not_ours
if outdated(token, fence) then return {2, now} end
local found = redis.call('HMGET', RECORD, 'token', 'fence', 'at', 'before', 'seq', 'progress', 'undo')
local before, seq = found[4] or '', found[5] or '0'
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
if found[1] ~= token or found[2] ~= fence then
  before, seq = found[1] and found[2] .. ' ' .. found[3] .. ' ' .. found[1] or '', '0'
  local at = string.format('%.0f', now)
  redis.call('HSET', RECORD, 'token', token, 'fence', fence, 'at', at, 'before', before, 'seq', seq)
  redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
end
return {1, now, before, tonumber(seq), found[6] or '', found[7] or ''}
