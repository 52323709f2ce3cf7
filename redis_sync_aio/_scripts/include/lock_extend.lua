-- Let the lease end `ttl` from now (text, not '0'), and its fence be remembered for longer. Whoever is next hears of an
-- end that comes sooner than it was told. A refusal by the ACL comes before NAME has another end.
local ended, keep = redis.call('PTTL', NAME), remember(ttl)
if redis.call('PTTL', FENCE) < keep then redis.call('PEXPIRE', FENCE, keep) end
redis.call('PEXPIRE', NAME, ttl)
if ended < 0 or ended > ttl + 0 then sooner(ttl) end
