-- Right after a grant, return what the last holder of a robust lock left behind, and replace it by
-- our own record. From then on only this lease writes the record, although earlier leases of the
-- same identity may have adopted it.
-- KEYS   name, queue, fence, polls, record
-- ARGV   1 token  2 its fence  3 ttl_ms (0 = forever)  4 writer: the id of this lease, without
--        spaces 5 '1' = withdraw this adoption: the lease that adopted the record before writes it
--        again
-- REPLY  {Renewed: GONE, TAKEN or SUPERSEDED (a later lease of the identity adopted it), server
--        time in us}, or {RENEWED: it is ours, server time in us, before, seq, progress, undo}: see
--        include/robust_record.lua; seq is an integer
-- REPLAY The record says what was found, so a second run returns the same. A copy that arrives
--        after the release, after another grant to or adoption by the identity, or after the
--        withdrawal, changes nothing.
-- COST   as lock/renew.lua. The first write is one that is allowed when the server is out of
--        memory, so a waiter that was granted the lock can adopt its record
-- include: lock_keys
-- include: lock_queue
-- include: robust_record
local holder, token, fence, writer = redis.call('GET', NAME), ARGV[1], ARGV[2], ARGV[4]
-- include: lock_check_owner
if outdated(token, fence) then return {Renewed.TAKEN, now} end
local found, wrong = read_record()
if wrong then return wrong end
local before, seq, same = found[4] or '', found[6] or '0', found[1] == token and found[2] == fence
local writers = same and found[5] or ''
local known = string.find(' ' .. writers .. ' ', ' ' .. writer .. ' ', 1, true)
local last = string.match(writers, '%S*$')
if known and last ~= writer then return {Renewed.SUPERSEDED, now} end
redis.call('PEXPIRE', RECORD, record_ttl(ARGV[3]))
-- include: robust_adopt
return {Renewed.RENEWED, now, before, tonumber(seq), found[7] or '', found[8] or ''}
