-- When to look again: 1 soon, as nobody wakes it; 2 from time to time: there is room behind the first, who may die.
local look = left() or -1
local soon = turn == RESERVED and not more and 1 or turn == FULL and used < limit and not ahead and 2 or 0
if turn == RESERVED and more and (look < 0 or more < look) then look = math.max(1, math.ceil(more)) end
if ticket == '' then return {0, 0, look, now, soon} end
local tail = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
local place = ahead or (tail or 0) + 1
local new = redis.pcall('ZADD', QUEUE, 'NX', place, ticket)
if type(new) == 'table' then -- out of memory: nobody new, but who is queued goes on
  if not redis.call('ZSCORE', QUEUE, ticket) then return new end
  new = 0
end
-- Each waiter asks again from time to time (then new = 0), far more often than the queue expires.
if new == 0 or not tail or place % 16 == 0 then redis.call('PEXPIRE', QUEUE, QUEUE_TTL) end
if poll_ms > 0 then
  redis.call('ZADD', POLLS, math.floor(now / 1000) + poll_ms, ticket)
  redis.call('PEXPIRE', POLLS, QUEUE_TTL)
end
-- Tell those who share what they hold, each process once. `shared` is read only here: where it is missing among many
-- permits that takes time, which those who do not wait need not spend.
if redis.call('HGET', STATE, 'shared') then
  local told = {}
  for _, holder in ipairs(redis.call('ZRANGE', PERMITS, 0, 63)) do
    local inbox = sharer(holder)
    if inbox and not told[inbox] and permit(holder) ~= 0 then
      told[inbox] = true
      wanted(holder)
    end
  end
end
return {2, 0, look, now, soon}
