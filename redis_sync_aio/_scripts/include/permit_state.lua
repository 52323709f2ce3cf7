-- What most calls need to know of the permits. Included behind `permit_keys`.
-- PERMITS: token -> until when (us). STATE: limit, used (sum of the weights), fence, kept (until when the keys last,
-- ms), shared ('1' once a process that shares was granted something), resized ('1' once resize has set the limit), and
-- '=token' -> 'weight fence' of each permit,
-- 'weight fence attempt' while its reader is the writer, by that attempt.
-- Of a range of fences '=token' has the first, `fence` the last. Weight 0: the tombstone of a request that was undone;
-- it is over half a microsecond earlier, so that it is told from a permit where only that is read.
-- include: publish
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds; exact, below 2^53 until 2255
local state = redis.call('HMGET', STATE, 'limit', 'used', 'fence', 'kept', field)
local limit, used, fence = (state[1] or 0) + 0, (state[2] or 0) + 0, (state[3] or 0) + 0 -- tonumber takes 75 ns more
local kept, own, saved = (state[4] or 0) + 0, state[5] or '', used
local function lasts(last, ms) -- do the keys outlive such a permit, that fence (if the clock went back), and an hour of rest?
  local rest = 1.25 * ms
  return kept >= (last > now and last or now) / 1000 + (rest > 3600000 and rest or 3600000)
end
