-- The facts about permits that most scripts need. Needs PERMITS, STATE and `field`.
-- PERMITS  token -> when its permit ends (us)
-- STATE    limit; used (the sum of the weights); fence (the last one); kept (until when the keys
--          last, ms); shared ('1' once a sharing process was granted something); resized ('1' once
--          a resize has set the limit); whole (the count at which a gate began); '=token' ->
--          'weight fence', of a writer 'weight fence previous': the fence of the writer before it
-- Of a range of fences '=token' has the first and `fence` the last.
-- Weight 0 is a tombstone: the request was undone. It ends half a microsecond earlier than a permit
-- would, so that both can be told apart where only PERMITS is read.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local state = redis.call('HMGET', STATE, 'limit', 'used', 'fence', 'kept', field)
-- x + 0, because tonumber(x) takes 75 ns more.
local limit, used, fence = (state[1] or 0) + 0, (state[2] or 0) + 0, (state[3] or 0) + 0
local kept, own, saved = (state[4] or 0) + 0, state[5] or '', used
-- What this package writes has `used`, and whole numbers; 2^53 is more than any fence.
if not state[2] and redis.call('PTTL', STATE) ~= FREE_MS
  or limit % 1 + used % 1 + fence % 1 + kept % 1 ~= 0 or fence >= 9007199254740992 then
  return redis.error_reply('WRONGTYPE ' .. STATE .. ' NOT_OURS: its fields say no limit and fence')
end

-- Whether the keys outlive a permit of `ms`, the fence `last` (if the clock went back), and a rest
-- of at least an hour.
local function lasts(last, ms)
  local rest = 1.25 * ms
  return kept >= (last > now and last or now) / 1000 + (rest > HOUR_MS and rest or HOUR_MS)
end
