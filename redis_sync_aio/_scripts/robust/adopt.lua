-- Look, right after a grant, what the last holder of a robust lock left behind, and put our own record in its place.
-- From then on this lease writes the record, and no lease that adopted it earlier does: an identity may have several.
-- KEYS  name, queue, fence, polls, record
-- ARGV  1 token  2 its fence  3 ttl_ms (0 = for ever)  4 writer: the id of this lease, without spaces
--       5 '1' = withdraw this adoption: the lease that adopted the record before writes it again
-- REPLY {0 GONE | 2 TAKEN | 3 SUPERSEDED: a later lease of the identity has adopted it, server time in us}, or
--       {1 OURS, server time in us, before, seq, progress, undo}: see include/robust_record.lua; seq is an integer
-- REPLAY  The record says what was found, so the second run answers the same. A copy that arrives after the release,
--       after another grant or adoption by the same identity, or after the withdrawal, changes nothing.
-- COST  as renew. It begins with a write that is allowed when the server is out of memory: who was handed the lock gets it
-- include: lock_keys
-- include: lock_queue
-- include: robust_record
local holder, token, fence, writer = redis.call('GET', NAME), ARGV[1], ARGV[2], ARGV[4]
-- include: lock_check_owner
if outdated(token, fence) then return {2, now} end
local found, wrong = read_record()
if wrong then return wrong end
local before, seq, same = found[4] or '', found[6] or '0', found[1] == token and found[2] == fence
local writers = same and found[5] or ''
local known, last = string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true), string.match(writers, '%S*$')
if known and last ~= writer then return {3, now} end
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
if ARGV[5] == '1' then -- it becomes the first of the list: there a late copy of the adoption is found out
  local others = string.match(writers, '^(.+) %S+$')
  if known and others then redis.call('HSET', RECORD, 'writers', writer .. ' ' .. others) end
  return {1, now, '', 0, '', ''}
end
if not known then
  local at = string.format('%.0f', now)
  if same then -- as many of them are remembered as have 832 bytes: 64 of ours
    if #writers + #writer >= 832 then writers = string.match(writers, ' (.*)$') or '' end
    redis.call('HSET', RECORD, 'writers', writers == '' and writer or writers .. ' ' .. writer)
  else
    before, seq = found[1] and found[2] .. ' ' .. found[3] .. ' ' .. found[1] or '', '0'
    redis.call('HSET', RECORD, 'token', token, 'fence', fence, 'at', at, 'before', before, 'writers', writer, 'seq', seq)
  end
  redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
end
return {1, now, before, tonumber(seq), found[7] or '', found[8] or ''}
