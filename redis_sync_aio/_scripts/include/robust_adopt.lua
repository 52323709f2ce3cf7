-- Write the record of the lease `writer`, unless it is `known`; withdraw it if ARGV[5] is '1'.
-- Needs what robust/adopt.lua read: `same`, `writers`, `found`; sets `before` and `seq`.
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
