-- Break a barrier until it is reset, or reset it. All parties that wait find it broken.
-- KEYS   permits, state, queue, polls
-- ARGV   1 token of this command  2 the number of parties  3 '1': break it; '0': reset it
--        4 ms for which the token is remembered
-- REPLY  1 if it is broken now, 0 if not
-- REPLAY A token that is remembered changes nothing.
-- COST   O(parties * log parties)
-- include: permit_setup
-- include: barrier_break
settle('')
if not permit(ARGV[1]) then
  send_away('', ARGV[3] == '1' and ARGV[2] + 0 or -ARGV[2])
  leave_tombstone(ARGV[1], ARGV[4] + 0)
end
save()
return limit > 0 and 1 or 0
