-- The keys of a lock, and how many fences whose grant is worth. The scripts of locks begin with it.
local NAME, QUEUE, FENCE, POLLS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local QUEUE_TTL = 600000
-- For how long the last fence is remembered: longer than the lease it was granted to, an hour at least.
local function remember(ms)
  return ms == '0' and 315360000000 or ms * 2 > 3600000 and ms * 2 or 3600000
end
-- include: sharing_token
local function fences_of(token) return sharer(token) and RANGE or 1 end
