-- Let the lease end `ttl` from now (text, not '0'), and its fence be remembered for longer.
redis.call('PEXPIRE', NAME, ttl)
local keep = remember(ttl)
if redis.call('PTTL', FENCE) < keep then redis.call('PEXPIRE', FENCE, keep) end
