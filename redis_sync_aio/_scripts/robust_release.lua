-- Give up a robust lock as release.lua does, and with it the record of the lease that ends.
-- KEYS  name, queue, fence, polls, record
-- ARGV  1 token ('' = only withdraw the ticket)  2 ticket ('' = none)  3 '1' as in release.lua
--       4 the writer, as in robust_adopt.lua ('' = it was never adopted, '*' = whoever adopted it last)
--       5 '1' if its work was broken off; so is that of a lease of the identity which adopted the record later
--       Done: the record goes. Broken off, or undo steps are left: it stays if it says anything; if the lease recorded
--       nothing itself, what it had found is put back. Adopted by another grant: it stays as it is.
-- REPLY 0 GONE (nobody holds the lock)  1 RELEASED  2 TAKEN (another token holds it)
-- REPLAY  As release.lua. The record is touched by whichever run finds that the token holds the lock, so once.
-- COST  as release.lua
-- include: keys
local holder, RECORD, writer, gap = redis.call('GET', NAME), KEYS[5], ARGV[4], 0
if holder == ARGV[1] then
  -- pcall: release all the same
  local found = redis.pcall('HMGET', RECORD, 'token', 'before', 'writers', 'progress', 'undo')
  local writers = found[3] or ''
  local adopted = writer ~= '' and string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true)
  if found[1] == holder and (adopted or writer == '*') then
    local done = ARGV[5] ~= '1' and (writer == '*' or string.match(writers, '%S*$') == writer)
    local undo = (found[5] or '') ~= ''
    local before_fence, at, token = string.match(found[2] or '', '^(%d+) (%d+) (.*)$')
    if not undo and done then redis.call('DEL', RECORD)
    elseif token then
      redis.call('PEXPIRE', RECORD, 604800000) -- first: allowed when the server is out of memory
      redis.call('HSET', RECORD, 'token', token, 'fence', before_fence, 'at', at, 'before', '',
        'writers', '', 'seq', '0')
    elseif not undo and (found[4] or '') == '' then redis.call('DEL', RECORD) end
  end
end
-- include: release
