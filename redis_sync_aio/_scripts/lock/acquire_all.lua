-- Acquire several locks together: all of them or none. Does not queue.
-- KEYS   name, queue, fence, polls of the first lock, then of the second, …: all in one hash slot
-- ARGV   1 ttl_ms (0 = forever)  2 the prefix of the tokens  3 their numbers, one for each lock,
--        separated by spaces
-- REPLY  for each lock what lock/acquire.lua replies: its fence (GRANTED), or BUSY (also if it is
--        free but another one is not: then ms left is -2), OWN or SPENT
-- REPLAY Locks that their tokens hold already stay as they are: OWN. A copy that arrives after a
--        release finds that token in FENCE: it is SPENT, and no lock is acquired.
-- COST   O(locks * log waiters)
-- include: lock_keys
-- include: lock_queue
local ttl, tokens, answers, free, all = ARGV[1], {}, {}, {}, true
for number in string.gmatch(ARGV[3], '%d+') do tokens[#tokens + 1] = ARGV[2] .. number end
local function turn_to(i)
  NAME, QUEUE, FENCE, POLLS = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i]
end

for i, token in ipairs(tokens) do
  turn_to(i)
  local holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
  local granted = last and string.sub(last, 18) == token
  if holder == token then
    local fence = granted and string.sub(last, 1, 16) or next_fence(token, ttl)
    answers[i] = {Outcome.OWN, tonumber(fence), redis.call('PTTL', NAME), now, 0}
  elseif not holder and not granted and settle('', heads()) == FREE then
    answers[i] = {Outcome.BUSY, 0, FREE_MS, now, 0}
    free[#free + 1] = i
  else
    all = false
    local code = not holder and granted and Outcome.SPENT or Outcome.BUSY
    answers[i] = {code, 0, redis.call('PTTL', NAME), now, 0}
  end
end
for _, i in ipairs(all and free or {}) do
  turn_to(i)
  answers[i] = tonumber(next_fence(tokens[i], ttl))
  hold(tokens[i], ttl)
end
return answers
