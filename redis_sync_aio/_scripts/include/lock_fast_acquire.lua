-- A short way: nobody waits and nobody holds, four calls. Returns the fence, or leaves all as it was.
-- Needs `token`, `ttl`, and `tail`: the place of the last ticket.
if not tail then
  local taken
  if ttl == '0' then taken = redis.call('SET', NAME, token, 'NX')
  else taken = redis.call('SET', NAME, token, 'NX', 'PX', ttl) end
  if taken then
    local clock = redis.call('TIME')
    local digits = clock[1] .. string.sub('00000' .. clock[2], -6)
    local fence = sharer(token) and string.format('%.0f', digits + RANGE - 1) or digits
    local before = redis.pcall('SET', FENCE, fence .. ' ' .. token, 'PX', remember(ttl), 'GET')
    if not before then return digits + 0 end
    if type(before) == 'table' then -- FENCE is somebody else's key: change nothing
      redis.call('DEL', NAME)
      return before
    end
    if string.sub(before, 1, 16) < digits and string.sub(before, 18) ~= token then return digits + 0 end
    -- The clock went back, or this token was granted before: put all back and look closely.
    redis.call('DEL', NAME)
    local ahead = math.max(0, math.ceil((string.sub(before, 1, 16) - digits) / 1000)) -- it is kept until the clock catches up
    redis.call('SET', FENCE, before, 'PX', remember(ttl) + ahead)
  end
end
