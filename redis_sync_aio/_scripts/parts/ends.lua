-- The permits that end first. Included behind `queue`.
local ends = redis.call('ZRANGE', PERMITS, 0, 1, 'WITHSCORES')
local soonest = ends[2] -- nil: unknown again, after a change
