-- Keep the parties of this process alive. Sets `alive`: whether all others are, too; `lives_ms`:
-- how long a party lives that does not ask again; `look`: in how many ms this one is to ask again.
local time, lives_ms = math.floor(now / 1000), math.max(ARGV[7] + 0, ARGV[4] + 0)
local alive, look = true, math.max(1, math.floor(lives_ms / 3))
local inbox = string.match(ticket, 'PUSHED_TICKET')
-- PEXPIRE first: it is allowed when out of memory, and then so is the rest of the script.
if present then redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS) end
for _, member in ipairs(waiting) do
  if member == ticket or inbox and string.match(member, 'PUSHED_TICKET') == inbox then
    redis.call('ZADD', POLLS, time + lives_ms, member)
  else
    local rest = (redis.call('ZSCORE', POLLS, member) or 0) - time
    if rest <= 0 then alive = false end
    look = math.max(1, math.min(look, rest))
  end
end
