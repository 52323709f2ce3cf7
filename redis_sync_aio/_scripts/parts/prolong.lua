redis.call('PEXPIRE', NAME, ttl)
local keep = remember(ttl)
if redis.call('PTTL', FENCE) < keep then redis.call('PEXPIRE', FENCE, keep) end
