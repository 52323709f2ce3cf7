-- Take several locks at once: all of them, or none. Does not queue.
-- KEYS  name, queue, fence, polls of the first lock, then of the second, …: all in one hash slot
-- ARGV  1 ttl_ms (0 = for ever)  2 what the tokens begin with  3 their ends: a number for each lock, by spaces
-- REPLY {for each lock: fence (GRANTED) or {code, fence, ms left, server time in us, soon}}, as lock/acquire.lua's
--       code: 0 BUSY (or free, while another one is not)  3 OWN  4 SPENT
-- REPLAY  Locks that are held by their tokens already stay as they are and are OWN. A copy that arrives after a
--       release finds that token in FENCE: it is SPENT, and none is taken.
-- COST  O(locks * log waiters)
-- include: lock_keys
-- include: lock_queue
local ttl, tokens, answers, free, all = ARGV[1], {}, {}, {}, true
for number in string.gmatch(ARGV[3], '%d+') do tokens[#tokens + 1] = ARGV[2] .. number end
local function turn_to(i) NAME, QUEUE, FENCE, POLLS = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i] end

for i, token in ipairs(tokens) do
  turn_to(i)
  local holder, last = redis.call('GET', NAME), redis.call('GET', FENCE)
  local granted = last and string.sub(last, 18) == token
  if holder == token then
    local fence = granted and string.sub(last, 1, 16) or next_fence(token, ttl)
    answers[i] = {3, tonumber(fence), redis.call('PTTL', NAME), now, 0}
  elseif not holder and not granted and settle('', heads()) == FREE then
    answers[i] = {0, 0, -2, now, 0}
    free[#free + 1] = i
  else
    all = false
    answers[i] = {not holder and granted and 4 or 0, 0, redis.call('PTTL', NAME), now, 0}
  end
end
for _, i in ipairs(all and free or {}) do
  turn_to(i)
  local fence = next_fence(tokens[i], ttl)
  hold(tokens[i], ttl)
  answers[i] = tonumber(fence)
end
return answers
