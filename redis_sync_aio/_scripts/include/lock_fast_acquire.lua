-- Acquire a lock that is neither held nor waited for, with four commands. Returns the fence, or
-- leaves all as it was. Needs `token`, `ttl`, `tail`: the place of the last ticket, and `least`: as
-- for next_fence.
if not tail then
  local taken
  if ttl == '0' then taken = redis.call('SET', NAME, token, 'NX')
  else taken = redis.call('SET', NAME, token, 'NX', 'PX', ttl) end
  if taken then
    local clock = redis.call('TIME')
    local digits = clock[1] .. string.sub('00000' .. clock[2], -6)
    if least and least > digits and least - digits <= APART_US then digits = least end
    local fence = sharer(token) and string.format('%.0f', digits + FENCE_RANGE - 1) or digits
    local before = redis.pcall('SET', FENCE, fence .. ' ' .. token, 'PX', remember(ttl), 'GET')
    if not before then return digits + 0 end
    if type(before) == 'table' then -- FENCE is a key of another type: change nothing
      redis.call('DEL', NAME)
      return before
    elseif string.byte(before, 17) ~= 32 then -- not behind 16 digits: not ours
      redis.call('DEL', NAME)
      redis.call('SET', FENCE, before) -- its ttl, if it had one, is lost
      return redis.error_reply('WRONGTYPE ' .. FENCE .. ' NOT_OURS: it is no fence')
    end
    if string.sub(before, 1, 16) < digits and string.sub(before, 18) ~= token then
      return digits + 0
    end
    -- The clock went back, or this token was granted before: restore the keys, take the long way.
    redis.call('DEL', NAME)
    -- Kept until the clock has caught up.
    local ahead = math.max(0, math.ceil((string.sub(before, 1, 16) - digits) / 1000))
    redis.call('SET', FENCE, before, 'PX', remember(ttl) + ahead)
  end
end
