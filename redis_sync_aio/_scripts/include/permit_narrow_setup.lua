-- Read what a script with the keys PERMITS and STATE alone needs: `had` and `its_fence` of the
-- permit of ARGV[1], and `until_then`, when it ends (us).
local PERMITS, STATE = KEYS[1], KEYS[2]
local field = '=' .. ARGV[1] -- of STATE: the caller's own permit
-- include: permit_state
-- include: permit_lookup
local until_then = tonumber(redis.call('ZSCORE', PERMITS, ARGV[1]) or 0)
local had, its_fence = permit(ARGV[1])
