"""Mutants of the permit scripts: each takes one decision out of them, and at least one check has to notice.

The checks are the tests of `tests/scripts/test_permit_*.py`, and then random histories, run against scripts in which
some text was replaced. The unmutated scripts pass all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ..scripts import permits as tools
from ..scripts import test_permit_scripts as suite
from ..scripts import test_permit_sharing as sharing
from ..scripts import test_permit_short_ways as short_ways
from ..simulation import test_permit_histories as histories
from ..support.histories import notice, private_server
from ..support.script_mutants import Client, Mutant, checks, failing, is_caught

pytestmark = pytest.mark.real

SCRIPTS = (
    *(f"permits/{name}" for name in ("acquire", "release", "renew", "resize")),
    "permits/downgrade",
)

MUTANTS: Mapping[str, Mutant] = {
    # P1 exclusion
    "any number fits": Mutant("return used + weight <= limit end", "return weight <= limit end"),
    "one too many fits": Mutant("<= limit end", "<= limit + 1 end"),
    "only whole limits fit": Mutant("<= limit end", "< limit end"),
    "weights do not count": Mutant(
        "used = used + weight",
        "used = used + 1",
    ),
    "an identity that holds is granted again": Mutant("or (permit(token) or 0) > 0 then", "then"),
    "a drop is not counted": Mutant("used = used - (permit(token) or 0)"),
    "what is over stays": Mutant("for _, token in ipairs(over) do drop(token) end"),
    "the sum is not stored after an expiry": Mutant(
        "if used ~= saved then redis.call('HSET', STATE, 'used', used) end", "if had then end"
    ),
    "the sum is not stored after a release": Mutant("save()\nreturn held and 1 or 0", "return held and 1 or 0"),
    "the sum is not stored after a renewal": Mutant("save()\nif not held or", "if not held or"),
    "the sum is not stored before who lines up": Mutant("save()\nlocal ms, look", "local ms, look"),
    "one too many may wait": Mutant("waiting >= most + 0", "waiting > most + 0"),
    "a request that waits is refused": Mutant("~= '' and not redis.call('ZSCORE', QUEUE, ticket)", "~= ''"),
    "the own permit is remembered when it is gone": Mutant("if token == ARGV[1] then own = '' end"),
    "the own permit is not remembered": Mutant("if token == ARGV[1] then own = mine end"),
    # P2 order
    "barging": Mutant("if turn == FREE and fits(weight) then", "if fits(weight) then"),
    "light ones pass a heavy head": Mutant(
        "        return FULL\n      end\n      leave(ticket)",
        "      end\n      leave(ticket)",
    ),
    "a dead heavy head blocks": Mutant("if tell(inbox, id, 0, left() or 1, true) then", "tell(inbox, id, 0, 1) do"),
    "nobody looks whether a heavy head lives": Mutant(
        "elseif turn == FULL and used < limit then look = Look.IN_TIME"
    ),
    "somebody looks although nothing is free": Mutant("turn == FULL and used < limit then", "turn == FULL then"),
    "nobody is told to look after a heavy head": Mutant("moved = used >= limit"),
    "nobody is told to look after the next heavy head": Mutant("moved = true"),
    "who looks is told to look": Mutant("if moved and next_inbox", "if next_inbox"),
    "who asks is told to ask": Mutant("and following ~= mine then", "then"),
    "who dies with it is told to look": Mutant("moved and next_inbox and next_inbox ~= inbox", "moved and next_inbox"),
    "last come, first served": Mutant(
        "'ZRANGE', QUEUE, 0, 1, 'WITHSCORES'",
        "'ZREVRANGE', QUEUE, 0, 1, 'WITHSCORES'",
    ),
    "a repeated request goes to the end": Mutant("'ZADD', QUEUE, 'NX', place", "'ZADD', QUEUE, place"),
    "a ticket that was passed over goes to the end": Mutant(
        "(former or '') ~= '' and former + 0 < now and", "false and"
    ),
    "a place of another clock counts": Mutant(
        "(former or '') ~= '' and former + 0 < now and", "(former or '') ~= '' and"
    ),
    "who comes back gets nothing that is free": Mutant("if back then first = nil end"),
    "nobody learns that a ticket was passed over": Mutant("back and 1 or new", "new"),
    "PUBLISH to nobody counts": Mutant("if heard > 0 then", "if heard >= 0 then"),
    "a dead poller blocks the queue": Mutant("lives = alive and tonumber(alive) * 1000 > now", "lives = alive"),
    "a living poller is dropped": Mutant("then return RESERVED, tonumber(alive) - now / 1000 end", "then end"),
    "too heavy waiters block": Mutant("elseif weight > limit or", "elseif"),
    "who could not be told loses his place": Mutant(
        "redis.call('ZADD', QUEUE, place, ticket)\n        redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)",
    ),
    # P3 wake-up
    "a release wakes nobody": Mutant("settle('')\nsave()\nreturn held and 1 or 0", "save()\nreturn held and 1 or 0"),
    "a renewal wakes nobody": Mutant("local waiting = settle('') ~= FREE", "local waiting = false"),
    "a resize wakes nobody": Mutant("settle('')\nsave()\nreturn before", "save()\nreturn before"),
    "a grant wakes nobody behind it": Mutant("if more and settle('') ~= FREE then", "if false then"),
    "only one is woken": Mutant(
        "if next_inbox and next_inbox ~= inbox then tell(next_inbox, next_id, 0, next_left) end",
        "do return FULL end",
    ),
    "the next in line is told nothing": Mutant(
        "(next_inbox == inbox and next_id or 0)",
        "0",
    ),
    "the next in line elsewhere is told nothing": Mutant(
        "if next_inbox and next_inbox ~= inbox then",
        "if false then",
    ),
    "too heavy waiters are told nothing": Mutant("if inbox ~= '' then tell(inbox, id, -1, 0) end"),
    "nobody says that it is worth looking soon": Mutant(
        "if turn == RESERVED and not more then look = Look.SOON elseif", "if"
    ),
    "the claim is ignored": Mutant(
        "hold(token, weight, tonumber(ms), its_fence)",
        "hold(token, weight, 30000, its_fence)",
    ),
    # P4 replay
    "a holder gets a second permit": Mutant("differs or had or weight", "differs or weight"),
    "what was undone is granted": Mutant("'=' .. token, '0 0')", "'!' .. token, '0 0')"),
    "a tombstone can be renewed": Mutant(
        "local held = had and had >= tonumber(ARGV[3])",
        "local held = had",
    ),
    "a renewal creates a permit": Mutant(
        "local held = had and had >= tonumber(ARGV[3])",
        "local held = true",
    ),
    "renewals come before the turn": Mutant(
        "local waiting = settle('') ~= FREE\nlocal had, ms, more, reserved = permit(ARGV[1]), tonumber(ARGV[2]),",
        "local before = permit(ARGV[1])\nlocal waiting = settle('') ~= FREE\nlocal had, ms, more, reserved = before, tonumber(ARGV[2]),",  # noqa: E501
    ),
    "who writes no more goes on": Mutant("had and had >= tonumber(ARGV[3])", "had and had > 0"),
    "a reader's permit is not renewed while it writes": Mutant("had >= tonumber(ARGV[3])", "had == tonumber(ARGV[3])"),
    # P6 leases
    "a renewal does nothing": Mutant("redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])"),
    # P8 fencing
    "a shorter permit is told to nobody": Mutant("if ended and ended > now + ms * 1000 then", "if false then"),
    "a longer permit is told": Mutant("if ended and ended > now + ms * 1000 then", "if true then"),
    "the end of a shorter permit is not looked up": Mutant("soonest = nil\nif ended", "if ended"),
    "a dead waiter keeps a shorter permit from the next": Mutant("ms, true) ~= 0 then return", "ms) then return"),
    "nobody is told that a ticket is new (short way)": Mutant("return {2, new, math", "return {2, 0, math"),
    "nobody is told that a ticket is new": Mutant("back and 1 or new", "back and 1 or 0"),
    "the fence is only the clock": Mutant("math.max(fence + 1, now)", "now"),
    "the fence is only a counter": Mutant("math.max(fence + 1, now)", "fence + 1"),
    "the fence is not stored": Mutant("'fence', string.format('%.0f', fence), '='", "'='"),
    "each reader has its own fence": Mutant("local rises = fenced(weight) or fence == 0", "local rises = true"),
    "writers share fences": Mutant(
        "limit ~= WRITER_WEIGHT or weight == WRITER_WEIGHT end", "limit ~= WRITER_WEIGHT end"
    ),
    "the keys last an hour however long the permit": Mutant("(rest > 3600000 and rest or 3600000)", "3600000"),
    "the keys last no longer than the fence": Mutant("(last > now and last or now) / 1000", "now / 1000"),
    "a fence ahead of the clock is forgotten": Mutant("math.max(time, math.ceil(fence / 1000))", "time"),
    # out of memory
    "a new grant begins with a harmless write": Mutant(
        "if more then leave(ticket) end\n  local its_fence",
        "leave(ticket)\n  local its_fence",
    ),
    "a renewal begins with ZADD": Mutant(
        "keep(ms, true)\n  redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])",
        "redis.call('ZADD', PERMITS, now + ms * 1000, ARGV[1])\n  keep(ms, true)",
    ),
    "a tombstone must be written": Mutant("redis.pcall('ZADD', PERMITS, now", "redis.call('ZADD', PERMITS, now"),
    "who is queued is thrown out": Mutant(
        "if not redis.call('ZSCORE', QUEUE, ticket) then return new end",
        "if true then return new end",
    ),
    # leftovers
    "release leaves the ticket": Mutant("if ARGV[2] ~= '' then leave(ARGV[2]) end"),
    "leaving leaves the poll": Mutant("redis.call('ZREM', POLLS, ticket)"),
    "a holder's ticket stays": Mutant("  if waits(ticket) then\n    leave(ticket)\n", "  if waits(ticket) then\n"),
    "the permits have no ttl": Mutant(
        "if short or new then redis.call('PEXPIRE', PERMITS, kept - time) end"
    ),
    "the state has no ttl": Mutant("redis.call('PEXPIRE', STATE, kept - time)"),
    "the permits that come again have no ttl": Mutant("if short or new then", "if short then"),
    "the state that a resize creates has no ttl": Mutant(
        "keep(TEN_YEARS_MS, false)",
    ),
    "the reset state has no ttl": Mutant(
        "redis.call('PEXPIRE', STATE, math.max(3600000, kept - math.floor(now / 1000)))"
    ),
    "the queue has no ttl": Mutant("redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)"),
    "the polls have no ttl": Mutant("redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS)"),
    # the first that is worth something
    "what was undone tells when to look": Mutant("undone = not time and soonest", "undone = false and soonest"),
    "what is held is taken for undone": Mutant("and tonumber(soonest) % 1 > 0", ""),
    "one that was undone is passed over": Mutant("while ends[i] and tonumber(ends[i]) % 1 > 0 do", "if false then"),
    "all that was undone are looked at": Mutant("PERMITS, 0, 63, 'WITHSCORES'), 4", "PERMITS, 0, -1, 'WITHSCORES'), 4"),
    "the end of those looked at is not taken": Mutant("time = ends[i] or ends[128]", "time = ends[i]"),
    "a tombstone looks like a permit": Mutant("now + ms * 1000 - 0.5", "now + ms * 1000"),
    "a foreign key for those who poll is found half-way": Mutant("redis.call('ZSCORE', POLLS, '')"),
    # the short ways
    "immediately past those who wait": Mutant("if not first[1] and own == '' and", "if own == '' and"),
    "immediately whatever its token has": Mutant("if not first[1] and own == '' and", "if not first[1] and"),
    "immediately whatever the limit": Mutant("(asked == limit or asked == 0) and", ""),
    "immediately although it does not fit": Mutant("and used + weight <= limit then", "then"),
    "immediately although something is over": Mutant("idle or soonest and soonest + 0 > now", "idle or soonest"),
    "immediately although the permits are lost": Mutant("idle or soonest and", "idle or not soonest or"),
    "immediately by what is held, unseen": Mutant("local idle = used == 0", "local idle = true"),
    "what is over stays although nothing is held": Mutant(
        "if idle then soonest = redis.call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES')[2] end"
    ),
    "immediately although the keys end": Mutant("if sound and lasts(next, ttl) and", "if sound and"),
    "immediately without a range for who shares": Mutant(" and string.sub(token, -1) ~= 'SHARING_MARK'"),
    "immediately with the last fence": Mutant("rises and (fence < now and now or fence + 1)", "rises and now"),
    "immediately with a fence that is not stored": Mutant("= next == now and clock", "= clock"),
    "immediately with a fence for each reader": Mutant("= rises and (fence", "= (fence"),
    "immediately with permits that never end": Mutant(
        "if idle then redis.call('PEXPIRE', PERMITS, kept - (now - now % 1000) / 1000) end"
    ),
    "immediately without the sum": Mutant("'used', used + weight, 'fence'", "'fence'"),
    "a short release wakes nobody": Mutant("if not first[1] and ARGV[2] ==", "if ARGV[2] =="),
    "a short release leaves the poll": Mutant("and ARGV[2] == '' and ARGV[3] ~= '1' then", "and ARGV[3] ~= '1' then"),
    "a short release of what is over": Mutant(
        "if soonest and soonest + 0 > clock[1] * 1000000 + clock[2] then", "if soonest then"
    ),
    "a short release of a tombstone": Mutant("known[2] or '', '^[1-9]%d*'", "known[2] or '', '^%d+'"),
    "a short release leaves no tombstone": Mutant("ARGV[2] == '' and ARGV[3] ~= '1' then", "ARGV[2] == '' then"),
    "another limit never gives way": Mutant("or used == 0 and turn == FREE)", ")"),
    "another limit gives way although somebody holds": Mutant("or used == 0 and turn == FREE)", "or turn == FREE)"),
    "another limit gives way although somebody waits": Mutant("or used == 0 and turn == FREE)", "or used == 0)"),
    "who says set does not": Mutant("ARGV[7] == 'set' or"),
    "who says keep does not": Mutant(" and ARGV[7] ~= 'keep'"),
    "what resize has set gives way": Mutant("if differs and not resized and", "if differs and"),
    "a resize is not remembered": Mutant("'used', used, 'resized', 1)", "'used', used)"),
    "a resize is forgotten with the permits": Mutant("if resized then redis", "if false then redis"),
    "a resize is remembered for an hour": Mutant("keep(TEN_YEARS_MS, false)", "keep(0, false)"),
    "nobody is told who set the limit": Mutant("now, differs and resized and 1 or 0}", "now, 0}"),
    "who sets the limit wakes nobody": Mutant("  turn, more = settle(ticket)\n  had", "  had"),
    "who sets the limit does not store it": Mutant("  redis.call('HSET', STATE, 'limit', limit)\n  turn", "  turn"),
    "a pause lets in": Mutant("return used + weight <= limit end", "return used + weight <= math.abs(limit) end"),
    "a pause is not stored": Mutant("if state[1] ~= 'PAUSED_LIMIT' then", "if false then"),
    "a pause is forgotten": Mutant("'used', used) end\n  keep(ttl, false)", "'used', used) end"),
    "a pause gives way to no other limit": Mutant(
        "if limit == PAUSED_LIMIT then\n    first", "if false then\n    first"
    ),
    "a pause gives way although somebody waits": Mutant(
        "if not first[1] or first[1] == mine then return FREE, first[1] end", "return FREE"
    ),
    "a pause is no other limit": Mutant("asked > 0 or asked == PAUSED_LIMIT", "asked > 0"),
    "a short release frees nothing": Mutant("soonest and known[1] - held", "soonest and known[1]"),
    "handed on although something is over": Mutant(
        "local held = soonest and soonest + 0 > now and", "local held = soonest and"
    ),
    "handed on without a tombstone": Mutant(" and ARGV[3] ~= '1' and string", " and string"),
    # the short way to the end of the queue
    "to the end although there is room": Mutant("local full = used >= limit and soonest", "local full = soonest"),
    "to the end although something is over": Mutant(
        "soonest and soonest + 0 > now and soonest",
        "soonest and soonest",
    ),
    "to the end by a tombstone": Mutant(" and soonest % 1 == 0"),
    "to the end of no queue": Mutant("local asks = ticket ~= '' and", "local asks ="),
    "to the end behind himself": Mutant("ticket ~= first[1] and"),
    "to the end without a poll": Mutant("poll_ms == 0 and"),
    "to the end although he has one": Mutant("poll_ms == 0 and own == ''", "poll_ms == 0"),
    "to the end however heavy": Mutant("if full and asks and weight <= limit and", "if full and asks and"),
    "to the end whatever the limit": Mutant("(asked == limit or asked == 0) and plain_ticket", "plain_ticket"),
    "to the end behind anybody": Mutant("and plain_ticket(first[1]) and", "and first[1] and"),
    "to the end without a word to who shares": Mutant("and not redis.call('HGET', STATE, 'shared') then", "then"),
    "to the end without a look at the memory": Mutant("if type(new) ~= 'table' then\n    if", "if new then\n    if"),
    "to the end, by another clock": Mutant("'WITHSCORES')[2] + 1, now)", "'WITHSCORES')[2] + 1, 0)"),
    "to the end, unless the clock went back": Mutant(
        "math.max(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] + 1, now)", "now"
    ),
    "to the end again, and the queue ends": Mutant("if new == 0 or place % 16 == 0 then", "if place % 16 == 0 then"),
    "to the end, and the queue ends": Mutant("if new == 0 or place % 16 == 0 then", "if new == 0 then"),
    "to the end, and the queue is kept each time": Mutant("if new == 0 or place % 16 == 0 then", "do"),
    # the short way from hand to hand
    "anybody with such a number is usual": Mutant("':' .. inbox .. ':' .. id", "':' .. id"),
    "anybody with such an inbox is usual": Mutant(
        "string.sub(ticket, -#own) == own", "string.find(ticket, ':' .. inbox .. ':', token, true)"
    ),
    "the heavy are usual": Mutant(" and weight + 0 <= limit then\n    return 'rsa:'", " then\n    return 'rsa:'"),
    "handed on by who has nothing": Mutant("plain_ticket(held and ARGV[2]", "plain_ticket(ARGV[2]"),
    "handed on by a waiter, too": Mutant("held and ARGV[2] == '' and first[1])", "held and first[1])"),
    "handed on before anybody": Mutant("(next_inbox or not first[3]) and"),
    "handed on although there is room for more": Mutant(
        "used - held + weight == limit",
        "used - held + weight <= limit",
    ),
    "handed on although it does not fit": Mutant("used - held + weight == limit", "used - held + weight >= limit"),
    "handed on although the keys end": Mutant("if lasts(next, ms) and", "if"),
    "handed on next to a tombstone": Mutant("(not other or other % 1 == 0)", "true"),
    "handed on with a look at what is gone": Mutant("ends[ends[1] == ARGV[1] and 4 or 2]", "ends[2]"),
    "handed on with a look at what is later": Mutant("ends[ends[1] == ARGV[1] and 4 or 2]", "ends[4]"),
    "handed on with the last fence": Mutant(
        "local next = fence < now and now or fence + 1\n  if lasts",
        "local next = now\n  if lasts",
    ),
    "handed on with a fence that is not stored": Mutant("= next == now and digits", "= digits"),
    "handed on with a late look": Mutant("other and math.min(math.ceil((other - now) / 1000), ms) or ms", "ms"),
    "handed on with a look at the others only": Mutant(
        "math.min(math.ceil((other - now) / 1000), ms) or ms",
        "math.ceil((other - now) / 1000) or ms",
    ),
    "handed on without a word of who is next": Mutant(
        "(next_inbox == inbox and next_id or 0) .. ' ' .. look",
        "'0 ' .. look",
    ),
    "handed on with word of who is next elsewhere": Mutant(
        "(next_inbox == inbox and next_id or 0) .. ' ' .. look",
        "next_id .. ' ' .. look",
    ),
    "handed on without a word to who is next elsewhere": Mutant(
        "if next_id and next_inbox ~= inbox then publish",
        "if false then publish",
    ),
    "handed on to the dead": Mutant("if heard ~= 0 and type(heard)", "if type(heard)"),
    "handed on without being allowed to say so": Mutant(
        "if heard ~= 0 and type(heard) == 'number' then",
        "if heard ~= 0 then",
    ),
    "handed on to who goes on waiting": Mutant("redis.call('ZREM', QUEUE, first[1]) and publish", "publish"),
    "handed on and kept": Mutant("redis.call('ZREM', PERMITS, ARGV[1])\n      redis.call('HDEL'", "redis.call('HDEL'"),
    "handed on and remembered": Mutant("      redis.call('HDEL', STATE, field)\n"),
    "handed on forever": Mutant(
        "if not other then redis.call('PEXPIRE', PERMITS, kept - (now - now % 1000) / 1000) end\n"
    ),
    "handed on without the sum": Mutant("'used', limit, 'fence', its_fence", "'fence', its_fence"),
    # writers
    "a writer is not told the fence before": Mutant("return before == '' and next or", "return next or"),
    "a writer does not keep the fence before": Mutant(
        "field, weight .. ' ' .. its_fence .. before)", "field, weight .. ' ' .. its_fence)"
    ),
    "a downgrade frees nothing": Mutant("used = used - had + 1"),
    "a downgrade wakes nobody": Mutant("settle('')\nsave()\nreturn held and 1 or 0", "return held and 1 or 0"),
    # a process that shares what it holds
    "everybody shares whose token ends so": Mutant(
        "if not before then return end",
        "if not before then return token, '1' end",
    ),
    "nobody shares": Mutant("if string.sub(token, -1) == 'SHARING_MARK' then", "if false then"),
    "one fence too few": Mutant("FENCE_RANGE - 1", "126"),
    "readers get a range": Mutant("shares and fenced(weight) and FENCE_RANGE", "shares and FENCE_RANGE"),
    "everybody gets a range": Mutant("shares and fenced(weight) and FENCE_RANGE", "fenced(weight) and FENCE_RANGE"),
    "nobody remembers that it is shared": Mutant("if shares then redis.call('HSET', STATE, 'shared', 1) end"),
    "it is shared from the beginning": Mutant(
        "if shares then redis.call('HSET', STATE, 'shared', 1) end", "redis.call('HSET', STATE, 'shared', 1)"
    ),
    "it is looked for where nobody shares": Mutant("if redis.call('HGET', STATE, 'shared') then", "do"),
    "who shares is not told that somebody waits": Mutant(
        "if redis.call('HGET', STATE, 'shared') then",
        "if false then",
    ),
    "who does not wait has others told": Mutant(
        "if ticket == '' then return {Outcome.BUSY, 0, ms, now, look} end",
        "if ticket == '' then notify_contended('host:1:a:1~') return {Outcome.BUSY, 0, ms, now, look} end",
    ),
    "all who hold are looked at": Mutant("'ZRANGE', PERMITS, 0, MAX_NOTIFIED - 1)", "'ZRANGE', PERMITS, 0, -1)"),
    "a process is told more than once": Mutant("and not told[inbox] and", "and"),
    "what was undone hides what is held": Mutant(" and permit(holder) ~= 0 then", " then"),
    "who shares is not told who is behind": Mutant(
        "if more and settle('') ~= FREE then notify_contended(token) end",
        "if more then settle('') end",
    ),
    "who shares is told although all behind fit": Mutant(
        "if more and settle('') ~= FREE then notify_contended(token) end",
        "if more then settle('') notify_contended(token) end",
    ),
    "a grant does not say that somebody is behind": Mutant("if following then", "if next_inbox == inbox then"),
    "a grant says that somebody is behind": Mutant(
        "if following then",
        "next_left = next_left or 0\n      if true then",
    ),
    "no time is known for a poller behind": Mutant("following and math.min", "next_id and math.min"),
    "a renewal reserves one fence": Mutant("fence = reserved + more - 1", "fence = reserved"),
    "a renewal reserves for readers": Mutant("if more > 0 and fenced(had) then", "if more > 0 then"),
    "a renewal reserves by the clock": Mutant("reserved = math.max(fence + 1, now)", "reserved = now"),
    "a renewal reserves by the counter": Mutant("reserved = math.max(fence + 1, now)", "reserved = fence + 1"),
    "a renewal does not store what it reserves": Mutant("if reserved > 0 then", "if false then"),
    "a renewal reserves before what is allowed when out of memory": Mutant(
        "    fence = reserved + more - 1\n",
        "    fence = reserved + more - 1\n    redis.call('HSET', STATE, 'fence', 0)\n",
    ),
    "what a renewal reserves is forgotten": Mutant(
        "    fence = reserved + more - 1\n  end\n  keep(ms, true)",
        "  end\n  keep(ms, true)\n  if reserved > 0 then fence = reserved + more - 1 end",
    ),
    "a renewal says nothing of the waiters": Mutant("(waiting or used > limit) and", "(used > limit) and"),
    "a renewal says nothing of a lower limit": Mutant("(waiting or used > limit) and", "waiting and"),
    "a renewal tells more than was asked": Mutant("if not held or not ARGV[4] then", "if not held then"),
}  # fmt: skip


CHECKS = checks(suite, sharing, short_ways)


@pytest.mark.ci
async def test_the_scripts_pass_every_check(redis: Client) -> None:
    assert await failing(redis, CHECKS) is None
    assert len(CHECKS) >= 40


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_every_mutant_is_caught(redis: Client, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    await is_caught(redis, monkeypatch, mutant, SCRIPTS, tools, CHECKS, noticed_by_histories)


def noticed_by_histories(mutant: Mutant) -> bool:
    with private_server() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories.History, "scripts", histories.loaded(client, mutant.load), raising=False)
        return notice(histories.History, histories.Crowded, histories.ReadersAndWriters, histories.Paused)
