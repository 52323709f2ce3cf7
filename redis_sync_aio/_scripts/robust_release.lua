-- Give up a robust lock as release.lua does, and with it the record of the lease that ends.
-- KEYS  name, queue, fence, polls, record
-- ARGV  1 token ('' = only withdraw the ticket)  2 ticket ('' = none)  3 '1' as in release.lua
--       4 the fence of the lease ('' = it was never adopted, '*' = whatever its fence)  5 '1' if its work was broken off
--       Done: the record goes. Broken off, or undo steps are left: it stays if it says anything; if the lease recorded
--       nothing itself, what it had found is put back. Of another token or fence: it stays as it is.
-- REPLY 0 GONE (nobody holds the lock)  1 RELEASED  2 TAKEN (another token holds it)
-- REPLAY  As release.lua. The record is touched by whichever run finds that the token holds the lock, so once.
-- COST  as release.lua
-- include: keys
local holder, RECORD, fence = redis.call('GET', NAME), KEYS[5], ARGV[4]
if holder == ARGV[1] then
  local found = redis.pcall('HMGET', RECORD, 'token', 'fence', 'before', 'progress', 'undo') -- pcall: release all the same
  if found[1] == holder and (found[2] == fence or fence == '*') then
    local undo = (found[5] or '') ~= ''
    local before_fence, at, token = string.match(found[3] or '', '^(%d+) (%d+) (.*)$')
    if not undo and ARGV[5] ~= '1' then redis.call('DEL', RECORD)
    elseif token then
      redis.call('PEXPIRE', RECORD, 604800000) -- first: allowed when the server is out of memory
      redis.call('HSET', RECORD, 'token', token, 'fence', before_fence, 'at', at, 'before', '', 'seq', '0')
    elseif not undo and (found[4] or '') == '' then redis.call('DEL', RECORD) end
  end
end
-- include: release
