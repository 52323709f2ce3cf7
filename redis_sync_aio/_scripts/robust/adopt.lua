-- Right after a grant, return what the last holder of a robust lock left behind, and replace it by
-- our own record. From then on only this lease writes the record, although earlier leases of the
-- same identity may have adopted it.
-- KEYS   name, queue, fence, polls, record
-- ARGV   1 token  2 its fence  3 ttl_ms (0 = forever)  4 writer: the id of this lease, without
--        spaces 5 '1' = withdraw this adoption: the lease that adopted the record before writes it
--        again
-- REPLY  {Renewed: GONE, TAKEN or SUPERSEDED (a later lease of the identity adopted it), server
--        time in us}, or {RENEWED: it is ours, server time in us, before, seq, progress, undo}: see
--        include/robust_record.lua; seq is an integer
-- REPLAY The record says what was found, so a second run returns the same. A copy that arrives
--        after the release, after another grant to or adoption by the identity, or after the
--        withdrawal, changes nothing.
-- COST   as lock/renew.lua. The first write is one that is allowed when the server is out of
--        memory, so a waiter that was granted the lock can adopt its record
-- include: robust_record
local writer, before, seq = ARGV[4], found[4] or '', found[6] or '0'
local known = string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true)
if known and latest ~= writer then return {Renewed.SUPERSEDED, now} end
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
if ARGV[5] == '1' then -- becomes the first of the list, where a late copy of the adoption finds it
  local others = string.match(writers, '^(.+) %S+$')
  if known and others then redis.call('HSET', RECORD, 'writers', writer .. ' ' .. others) end
  return {Renewed.RENEWED, now, '', 0, '', ''}
end
if not known then
  local at = string.format('%.0f', now)
  if same then -- remember as many writers as fit into 832 bytes: 64 of ours
    if #writers + #writer >= 832 then writers = string.match(writers, ' (.*)$') or '' end
    redis.call('HSET', RECORD, 'writers', writers == '' and writer or writers .. ' ' .. writer)
  else
    before = found[1] and found[2] .. ' ' .. found[3] .. ' ' .. found[1] or ''
    seq = '0'
    redis.call('HSET', RECORD, 'token', token, 'fence', fence, 'at', at, 'before', before,
      'writers', writer, 'seq', seq)
  end
  redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
end
return {Renewed.RENEWED, now, before, tonumber(seq), found[7] or '', found[8] or ''}
