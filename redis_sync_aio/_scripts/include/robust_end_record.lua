-- End the record of a robust lock as its lease is released. ARGV[4]: the writer, as in
-- robust/adopt.lua (absent or '' = never adopted, '*' = the last one that adopted it). ARGV[5]: '1'
-- if the work was interrupted; a lease that was superseded counts as interrupted.
-- The record of finished work is deleted. It is kept, if it says anything, when the work was
-- interrupted or undo steps are left; if the lease recorded nothing itself, what it had found is
-- put back. A record that another grant has adopted stays as it is, and so does all of it unless
-- the token holds the lock.
-- Needs `holder` and `record`.
if record and holder then
  local writer = ARGV[4] or ''
  -- pcall: the lock is released in any case
  local found = redis.pcall('HMGET', record, 'token', 'before', 'writers', 'progress', 'undo')
  local writers = found[3] or ''
  local adopted = writer ~= '' and string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true)
  if found[1] == holder and (adopted or writer == '*') then
    local done = ARGV[5] ~= '1' and (writer == '*' or string.match(writers, '%S*$') == writer)
    local undo = (found[5] or '') ~= ''
    local before_fence, at, token = string.match(found[2] or '', '^(%d+) (%d+) (.*)$')
    if not undo and done then redis.call('DEL', record)
    elseif token then
      redis.call('PEXPIRE', record, WEEK_MS) -- first: allowed when the server is out of memory
      redis.call('HSET', record, 'token', token, 'fence', before_fence, 'at', at, 'before', '',
        'writers', '', 'seq', '0')
    elseif not undo and (found[4] or '') == '' then redis.call('DEL', record) end
  end
end
