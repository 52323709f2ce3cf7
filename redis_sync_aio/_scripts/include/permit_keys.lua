-- The keys of permits, and the first tickets of the queue.
-- A limit of WRITER_WEIGHT is that of a read/write lock: readers weigh 1, the writer weighs it all.
-- One of OPEN_LIMIT, or below 0, is that of a gate: it lets in all, or none. See count_down.lua.
-- One of PAUSED_LIMIT is that of a paused semaphore, which lets in none either.
local PERMITS, STATE, QUEUE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- nil: unknown again, after a change
local first = redis.call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
local field = '=' .. ARGV[1] -- of STATE: the caller's own permit
