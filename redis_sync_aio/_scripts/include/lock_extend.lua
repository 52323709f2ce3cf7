-- Let the lease end `ttl` ms from now (text, not '0') and remember its fence for longer. If that is
-- sooner than the next waiter expects, notify it. FENCE comes first: a refusal by the ACL must
-- leave NAME as it was.
-- include: notify_sooner
local ended, keep = redis.call('PTTL', NAME), remember(ttl)
if redis.call('PTTL', FENCE) < keep then redis.call('PEXPIRE', FENCE, keep) end
redis.call('PEXPIRE', NAME, ttl)
if ended < 0 or ended > ttl + 0 then notify_sooner(ttl) end
