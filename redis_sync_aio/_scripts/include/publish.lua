-- Publish to an inbox. Returns how many listen; a table if PUBLISH is refused.
-- In a cluster, a message published at one node is heard at all of them; the inbox of one shard has
-- CLUSTER_MARK in its name. A client that is connected to the node that had these keys before would
-- take a message for a grant although nobody listens here. So it gets ASK_AGAIN, which
-- redirects it.
local function publish(inbox, message)
  if string.find(inbox, 'CLUSTER_MARK%x+$') then
    local here = redis.pcall('PUBSUB', 'NUMSUB', inbox)
    if here.err then return here end
    if here[2] == 0 then
      redis.pcall('PUBLISH', inbox, string.match(message, '^%d+') .. ' ASK_AGAIN 0 0')
      return 0
    end
  end
  return redis.pcall('PUBLISH', inbox, message)
end
