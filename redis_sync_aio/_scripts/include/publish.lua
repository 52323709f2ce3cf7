-- Publish to an inbox. 0: nobody listens; a table: we may not.
-- In a cluster (the inbox of a shard there has a capital letter) what is published at one node is heard at all of them.
-- So who is connected to the node that had these keys before would take for a grant what is none, as nobody listens
-- here. It is told to ask again, which shows it the way.
local function push(inbox, message)
  if string.find(inbox, 'C', 5, true) then
    local here = redis.pcall('PUBSUB', 'NUMSUB', inbox)
    if here.err then return here end
    if here[2] == 0 then
      redis.pcall('PUBLISH', inbox, string.match(message, '^%d+') .. ' -1 0 0')
      return 0
    end
  end
  return redis.pcall('PUBLISH', inbox, message)
end
