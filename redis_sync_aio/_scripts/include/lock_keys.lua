-- The keys of a lock, and how many fences one grant reserves. Every script of locks starts with it.
local NAME, QUEUE, FENCE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- How long the last fence is remembered: longer than the lease it was granted to, at least an hour.
local function remember(ms)
  return ms == '0' and TEN_YEARS_MS or ms * 2 > HOUR_MS and ms * 2 or HOUR_MS
end
-- include: sharing_token
local function fences_of(token) return sharer(token) and FENCE_RANGE or 1 end
