-- The keys of permits, and who waits first.
local PERMITS, STATE, QUEUE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local QUEUE_TTL, WHOLE = 600000, 2147483647 -- a limit of WHOLE: readers weigh 1, a writer weighs it all
local first = redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES') -- nil: unknown again, after a change
local field = '=' .. ARGV[1] -- of STATE: the caller's own permit
