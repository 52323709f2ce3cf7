-- Publishing to inboxes. What counts is who listens at this server: it alone has the keys. A proxy,
-- or a slot that moved, may have led the subscription to another node of a cluster, which hears the
-- message all the same; so PUBLISH must not be the first to ask, when a grant depends on it.

-- Returns how many listen to an inbox here; a table if that cannot be asked.
local function listening(inbox)
  local here = redis.pcall('PUBSUB', 'NUMSUB', inbox)
  return here.err and redis.pcall('PUBLISH', inbox, '') or here[2] -- an empty message says nothing
end

-- Publish to an inbox. Returns how many listen; a table if PUBLISH is refused. `counts`: only if
-- a connection listens here. Else the owner gets ASK_AGAIN, wherever it listens: its ticket goes.
-- An inbox with SHARD_MARK is in a slot of this node: SPUBLISH goes to its shard, and counts. It
-- listens to PUBLISH as well, in case its slot has moved, or we may not SPUBLISH.
local function publish(inbox, message, counts)
  local sharded = string.sub(inbox, -5, -5) == 'SHARD_MARK'
  local heard = sharded and redis.pcall('SPUBLISH', inbox, message)
  if heard and type(heard) == 'number' and heard > 0 then return heard end
  if counts and (heard == 0 or listening(inbox) == 0) then
    redis.pcall('PUBLISH', inbox, string.match(message, '^%d+') .. ' ASK_AGAIN 0 0')
    return 0
  end
  return redis.pcall('PUBLISH', inbox, message)
end
