"""Mutants: each takes one decision out of the scripts of locks, and at least one check has to notice.

The checks are the tests of `tests/scripts` and a few of our own, and then random histories; they run here against
scripts in which some text was replaced. The unmutated scripts pass all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ..scripts import test_acquire_all as together
from ..scripts import test_lock_scripts as suite
from ..scripts.test_lock_scripts import KEYS, acquire, holder, polled, run
from ..simulation import test_histories as histories
from ..support import executions
from ..support.histories import notice, private_server
from ..support.inside import ticket_member
from ..support.script_mutants import Check, Client, Mutant, checks, failing, is_caught

pytestmark = pytest.mark.real

SCRIPTS = ("lock/acquire", "lock/release", "lock/renew", "lock/force_release")


MUTANTS: Mapping[str, Mutant] = {
    # P1 exclusion
    "release without token check": Mutant("if holder and holder ~= ARGV[1] then return 2 end"),
    "renew without token check": Mutant("if holder ~= ARGV[1] then", "if not holder then"),
    "get, then set without NX": Mutant("'SET', NAME, token, 'NX', 'PX', ttl", "'SET', NAME, token, 'PX', ttl"),
    "forever without NX": Mutant(
        "taken = redis.call('SET', NAME, token, 'NX')",
        "taken = redis.call('SET', NAME, token)",
    ),
    "a held lock is granted": Mutant("if not holder then\n  settled =", "if true then\n  settled ="),
    "a key of somebody else costs the lock": Mutant("redis.call('DEL', NAME)\n      return before", "return before"),
    # P8 the fence that a Redlock asks for
    "a fence that is asked for may be far ahead": Mutant("least > digits and least - digits <= APART_US", "least"),
    "a fence that is asked for may be far ahead, behind a queue": Mutant(
        "least > fence and least - fence <= APART_US", "least"
    ),
    "a fence that is asked for may be below the last one": Mutant(
        "if string.sub(before, 1, 16) < digits and", "if (least or string.sub(before, 1, 16) < digits) and"
    ),
    # P2 order
    "barging in the slow path": Mutant("if settled == FREE then", "if true then"),
    "barging in the fast path": Mutant("if not tail then\n", "if true then\n"),
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
    "nobody learns that a ticket was passed over": Mutant("back and 1 or new", "new"),
    "PUBLISH to nobody counts": Mutant("if heard > 0 then", "if heard >= 0 then"),
    "a dead poller blocks the queue": Mutant("if alive and tonumber(alive) * 1000 > now then", "if alive then"),
    "a living poller is dropped": Mutant("then return RESERVED end", "then end"),
    "one too many may wait": Mutant("waiting >= most + 0", "waiting > most + 0"),
    "a request that waits is refused": Mutant("~= '' and not redis.call('ZSCORE', QUEUE, ticket)", "~= ''"),
    # P3 wake-up
    "a release wakes nobody": Mutant("local next = settle('', first)", "local next = FREE"),
    "a renewal that finds it gone wakes nobody": Mutant("settle('', heads())\n  return {0, now}", "return {0, now}"),
    "force wakes nobody": Mutant("if settle('', heads()) ~= GRANTED then", "if true then"),
    "the next in line is told nothing": Mutant("(next_inbox == inbox and next_id or 0)", "0"),
    "the next in line elsewhere is told nothing": Mutant(
        "if next_inbox and next_inbox ~= inbox then",
        "if false then",
    ),
    "a foreign holder is taken for one of ours": Mutant(
        "if holder and last and string.sub(last, 18) == holder then look = Look.NONE end",
        "look = Look.NONE",
    ),
    "the claim is ignored": Mutant(
        "hold(token, ms)\n        if next_inbox",
        "hold(token, '30000')\n        if next_inbox",
    ),
    # P4 replay
    "spent tokens are granted again (slow path)": Mutant(
        "local spent = not holder and last_token == token and ARGV[5] ~= '1'",
        "local spent = false",
    ),
    "spent tokens are granted again (fast path)": Mutant(" and string.sub(before, 18) ~= token"),
    "identities are spent": Mutant(" and ARGV[5] ~= '1'"),
    "a replay begins the ttl again": Mutant(
        "return {Outcome.OWN, tonumber(fence",
        "hold(token, ttl) return {Outcome.OWN, tonumber(fence",
    ),
    "a replay takes a new fence": Mutant(
        "tonumber(fence or next_fence(token, ttl))",
        "tonumber(next_fence(token, ttl))",
    ),
    # leftovers
    "release leaves the ticket": Mutant("redis.call('ZREM', QUEUE, ARGV[2])"),
    "release leaves the poll": Mutant("redis.call('ZREM', POLLS, ARGV[2])"),
    "a grant leaves its ticket (acquire)": Mutant(
        "if ticket ~= '' then redis.call('ZREM', QUEUE, ticket) end\n    if poll_ms",
        "if poll_ms",
    ),
    "a grant leaves its poll": Mutant(
        "if poll_ms > 0 then redis.call('ZREM', POLLS, ticket) end\n    local",
        "local",
    ),
    "a grant leaves its ticket (hand-over)": Mutant(
        "redis.call('ZREM', QUEUE, ticket)\n      local next_inbox",
        "local next_inbox",
    ),
    "who begins to poll is queued before a foreign key is found": Mutant(
        "if poll_ms > 0 then redis.call('ZSCORE', POLLS, ticket) end",
    ),
    "who goes leaves the queue before a foreign key is found": Mutant(
        "redis.call('ZREM', POLLS, ARGV[2])\n  redis.call('ZREM', QUEUE, ARGV[2])",
        "redis.call('ZREM', QUEUE, ARGV[2])\n  redis.call('ZREM', POLLS, ARGV[2])",
    ),
    "a holder's ticket stays": Mutant(
        "if ticket ~= '' and (spent or holder == token) then redis.call('ZREM', QUEUE, ticket) end",
    ),
    "a polling holder's ticket stays alive": Mutant(
        "if poll_ms > 0 and (spent or holder == token) then redis.call('ZREM', POLLS, ticket) end",
    ),
    "the queue has no ttl": Mutant("redis.call('PEXPIRE', QUEUE, QUEUE_TTL_MS)"),
    "the polls have no ttl": Mutant("redis.call('PEXPIRE', POLLS, QUEUE_TTL_MS)"),
    "the lock has no ttl": Mutant("token, 'NX', 'PX', ttl", "token, 'NX'"),
    # P6 leases
    "renew does nothing": Mutant("redis.call('PEXPIRE', NAME, ttl)"),
    "renew forgets the fence": Mutant("redis.call('PEXPIRE', FENCE, keep)"),
    "renew forgets a fence ahead of the clock": Mutant("if redis.call('PTTL', FENCE) < keep then", "if true then"),
    # P8 fencing
    "the fence is not stored (slow path)": Mutant(
        "local last = redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep, 'GET')",
        "local last = redis.call('GET', FENCE)",
    ),
    "the fence is not stored (fast path)": Mutant(
        "redis.pcall('SET', FENCE, fence .. ' ' .. token, 'PX', remember(ttl), 'GET')",
        "redis.pcall('GET', FENCE)",
    ),
    "the fence is the stored one": Mutant(
        "tonumber(string.sub(last, 1, 16)) + 1",
        "tonumber(string.sub(last, 1, 16))",
    ),
    "the fence is only the clock (slow path)": Mutant(
        "if last and string.sub(last, 1, 16) >= fence then",
        "if false then",
    ),
    "a fence ahead of the clock is forgotten before the clock has caught up": Mutant(
        " + math.floor((fence - now) / 1000)",
    ),
    "the fence is only the clock (fast path)": Mutant("string.sub(before, 1, 16) < digits and "),
    "the fence is only a counter": Mutant(
        "local fence, keep, more = digits, ",
        "local fence, keep, more = string.format('%.0f', tonumber(string.sub(redis.call('GET', FENCE) or '0', 1, 16)) + 1), ",  # noqa: E501
    ),
    # a process that shares what it holds
    "everybody shares whose token ends so": Mutant(
        "if not before then return end",
        "if not before then return token, '1' end",
    ),
    "nobody shares": Mutant("if string.sub(token, -1) == 'SHARING_MARK' then", "if false then"),
    "one fence too few": Mutant("FENCE_RANGE", "127"),
    "a range is not stored (slow path)": Mutant(
        "return more == 0 and fence or string.format('%.0f', fence + more)",
        "return fence",
    ),
    "a range is not stored when the clock stood still": Mutant(
        "redis.call('SET', FENCE, upto() .. ' ' .. token, 'PX', keep)",
        "redis.call('SET', FENCE, fence .. ' ' .. token, 'PX', keep)",
    ),
    "a range is not stored (fast path)": Mutant(
        "sharer(token) and string.format('%.0f', digits + FENCE_RANGE - 1) or digits",
        "digits",
    ),
    "a replay gets the last of the range": Mutant(
        "string.sub(last, 1, 16) + 1 - fences_of(token)",
        "string.sub(last, 1, 16)",
    ),
    "a renewal reserves a whole range": Mutant("next_fence(holder, ttl, ARGV[3])", "next_fence(holder, ttl)"),
    "a renewal reserves what was not asked for": Mutant("ARGV[3] == '0' and 0 or next_fence", "next_fence"),
    "every renewal reserves": Mutant("if not ARGV[3] then return {1, now} end", "ARGV[3] = ARGV[3] or '0'"),
    "a renewal does not name the waiters": Mutant(
        "tonumber(first), redis.call('ZCARD', QUEUE) > 0 and 1 or 0}",
        "tonumber(first), 0}",
    ),
    "who shares is not told that somebody waits": Mutant(
        "if holder then notify_contended(holder) end\nreturn {", "return {"
    ),
    "who shares is told although nobody waits": Mutant("sharer(token) and redis.call('ZCARD', QUEUE) > 0", "true"),
    "who shares is not told that it was taken by force": Mutant(
        "if holder then notify_contended(holder) end\nreturn holder", "return holder"
    ),
    "who shares is not told who is behind": Mutant("then notify_contended(token) end", "then end"),
    "a grant does not say that somebody is behind": Mutant(
        "if following then grant",
        "if next_inbox == inbox then grant",
    ),
    "a shorter lease is told to nobody": Mutant("if ended < 0 or ended > ttl + 0 then", "if false then"),
    "a lease that gets an end is told to nobody": Mutant("if ended < 0 or ended", "if ended"),
    "a longer lease is told": Mutant("if ended < 0 or ended > ttl + 0 then", "if true then"),
    "a dead waiter keeps a shorter lease from the next": Mutant(
        "' ' .. ms, true) ~= 0 then return end", "' ' .. ms, true) then return end"
    ),
    "nobody is told that a ticket is new": Mutant("back and 1 or new", "back and 1 or 0"),
    "a busy lock is never left free": Mutant("ms - since >= BUSY_MS then", "false then"),
    "a lock is left free at each release": Mutant("ms - since >= BUSY_MS then", "true then"),
    "a lock that is left free belongs to the first waiter": Mutant("redis.call('ZADD', QUEUE, -1, 'POLLERS_TICKET')"),
    "a lock that is left free is not free": Mutant(
        "redis.call('DEL', NAME)\n  redis.call('ZADD', POLLS", "redis.call('ZADD', POLLS"
    ),
    "the waiters do not hear until when it is left free": Mutant("notify_sooner(gap)"),
    "it is left free for good": Mutant("POLLS, ms + gap, 'POLLERS_TICKET')", "POLLS, ms * 2, 'POLLERS_TICKET')"),
    "it is left free by those who do not say so": Mutant("if holder and gap > 0 then", "if holder then gap = 150"),
    "a release without waiters does not end that it is busy": Mutant("redis.pcall('ZREM', POLLS, 'POLLERS_TICKET')"),
    "a foreign key for those who poll costs the release": Mutant(
        "redis.pcall('ZSCORE', POLLS, 'POLLERS_TICKET')", "redis.call('ZSCORE', POLLS, 'POLLERS_TICKET')"
    ),
    "a clock that went back leaves nothing free for long": Mutant(
        "or type(since) == 'string' and since + 0 > ms then", "then"
    ),
    "a grant says that somebody is behind": Mutant("if following then grant", "if true then grant"),
}  # fmt: skip


TOGETHER: Mapping[str, tuple[str, str]] = {
    "takes what is free although one is taken": ("ipairs(all and free or {})", "ipairs(free)"),
    "takes what others hold": ("elseif not holder and not granted and settle(", "elseif not granted and settle("),
    "takes nothing at all": ("ipairs(all and free or {})", "ipairs({})"),
    "barges": ("settle('', heads()) == FREE then\n    answers", "true then\n    answers"),
    "a spent token is granted again": ("not holder and not granted and settle(", "not holder and settle("),
    "a spent token is just busy": ("not holder and granted and 4 or 0", "0"),
    "a replay begins the ttl again": ("if holder == token then\n", "if holder == token then hold(token, ttl)\n"),
    "a replay takes a new fence": (
        "granted and string.sub(last, 1, 16) or next_fence(token, ttl)",
        "next_fence(token, ttl)",
    ),
    "a replay takes back what was lost": ("else\n    all = false", "else"),
    "all locks are the first": ("turn_to(i)\n  answers[i] = tonumber", "turn_to(1)\n  answers[i] = tonumber"),
    "only the first is looked at": ("turn_to(i)\n  local holder", "turn_to(1)\n  local holder"),
    "all have one token": ("ARGV[2] .. number", "ARGV[2] .. '1'"),
    "the holder is not written": ("  hold(tokens[i], ttl)\n", ""),
    "the remaining time is not told": ("0, redis.call('PTTL', NAME), now, 0}\n  end", "0, -2, now, 0}\n  end"),
}
"""Those of lock/acquire_all.lua."""


# -- checks besides those of the script tests ---------------------------------------------------------------


async def check_whoever_finds_it_gone_wakes_the_next(redis: Client) -> None:
    finders: dict[str, tuple[bytes | int, ...]] = {
        "lock/renew": (b"a", 1000),
        "lock/release": (b"a", b""),
        "lock/force_release": (),
    }
    for finder, arguments in finders.items():
        await redis.flushall()
        async with redis.pubsub() as pubsub:
            await pubsub.subscribe("rsa:alive")
            await pubsub.get_message(timeout=5)
            await acquire(redis, b"a")
            await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 500, b"b"))
            await redis.delete(KEYS.name)
            await run(redis, finder, *arguments)
            assert await holder(redis) == b"b", finder
            assert await redis.exists(KEYS.queue) == 0, finder


async def check_a_holder_that_asks_again_leaves_the_queue(redis: Client) -> None:
    await redis.set(KEYS.name, "foreign", px=5000)
    await acquire(redis, b"a", polled(b"a"), 60_000)
    await redis.set(KEYS.name, "a", px=5000)
    assert (await acquire(redis, b"a", polled(b"a"), 60_000))[0] == 3
    assert await redis.exists(KEYS.queue, KEYS.polls) == 0


OWN: tuple[Check, ...] = (
    check_whoever_finds_it_gone_wakes_the_next,
    check_a_holder_that_asks_again_leaves_the_queue,
)
CHECKS = {**checks(suite), **{repr(check): check for check in OWN}}
CHECKS_TOGETHER = checks(together)


async def test_the_scripts_pass_every_check(redis: Client) -> None:
    assert await failing(redis, {**CHECKS, **CHECKS_TOGETHER}) is None
    assert len(CHECKS) >= 15
    assert len(CHECKS_TOGETHER) >= 10


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_every_mutant_is_caught(redis: Client, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    await is_caught(redis, monkeypatch, mutant, SCRIPTS, suite, CHECKS, noticed_by_histories)


@pytest.mark.ci
@pytest.mark.parametrize(("old", "new"), TOGETHER.values(), ids=TOGETHER)
async def test_every_mutant_of_several_locks_is_caught(
    redis: Client, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    mutant = Mutant(old, new, "lock/acquire_all")
    await is_caught(redis, monkeypatch, mutant, [mutant.script], together, CHECKS_TOGETHER, noticed_by_histories)


def noticed_by_histories(mutant: Mutant) -> bool:
    with private_server(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executions, "load", mutant.load)
        return notice(histories.History)
