-- The permits that end first, and when the first does. Included after `permit_keys`.
local ends = redis.call('ZRANGE', PERMITS, 0, 1, 'WITHSCORES')
local soonest = ends[2] -- nil: unknown again, after a change
