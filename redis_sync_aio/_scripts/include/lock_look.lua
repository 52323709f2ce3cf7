-- Read who holds the lock, and `last`: the last fence, 16 digits, and behind a space the token that
-- it was granted to. Stop if FENCE has a text of another program.
local holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
if last and #(string.match(last, '^%d+ ') or '') ~= 17 then
  return redis.error_reply('WRONGTYPE ' .. FENCE .. ' NOT_OURS: it is no fence')
end
