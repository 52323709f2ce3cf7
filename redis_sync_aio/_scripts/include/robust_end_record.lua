-- Delete the record of a robust lock, or keep it, as its lease is released. Needs `holder`, RECORD
-- and `writer`; see robust/release.lua for the arguments.
if holder == ARGV[1] then
  -- pcall: the lock is released in any case
  local found = redis.pcall('HMGET', RECORD, 'token', 'before', 'writers', 'progress', 'undo')
  local writers = found[3] or ''
  local adopted = writer ~= '' and string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true)
  if found[1] == holder and (adopted or writer == '*') then
    local done = ARGV[5] ~= '1' and (writer == '*' or string.match(writers, '%S*$') == writer)
    local undo = (found[5] or '') ~= ''
    local before_fence, at, token = string.match(found[2] or '', '^(%d+) (%d+) (.*)$')
    if not undo and done then redis.call('DEL', RECORD)
    elseif token then
      redis.call('PEXPIRE', RECORD, WEEK_MS) -- first: allowed when the server is out of memory
      redis.call('HSET', RECORD, 'token', token, 'fence', before_fence, 'at', at, 'before', '',
        'writers', '', 'seq', '0')
    elseif not undo and (found[4] or '') == '' then redis.call('DEL', RECORD) end
  end
end
