"""Talks, command by command: what happens between their reading and their EXEC. See `_engine/watch.py`.

A process that is stopped in the midst of a talk, for a moment or for a minute, is overtaken just as here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from redis_sync_aio._engine.watch import DECISIONS, converse
from redis_sync_aio._engine.watch_dialogue import microseconds

from ..support.executions import blocking_server as blocking_server
from ..support.executions import client as client
from ..support.executions import conduct
from ..support.inside import (
    CONFLICT,
    MAX_NOTIFIED,
    WRITER_WEIGHT,
    Argument,
    Call,
    Keys,
    Outcome,
    ReplyError,
    Words,
    load,
    lock_keys,
    mark_keys,
    pack,
    permit_keys,
    ticket_member,
)

LOCK = lock_keys(b"t")
MARK = mark_keys(LOCK)
SEM = permit_keys(b"t", "sem")
RW = permit_keys(b"t", "rw")
INBOX = b"rsa:talks"
TTL = 30_000


def said(keys: Keys, script: str, *arguments: bytes | int) -> Call:
    return Call(0.0, 0.0, lambda _: None).of(keys, load(script), arguments)


def run(client: Any, keys: Keys, script: str, *arguments: bytes | int) -> Any:
    """By the script itself: what others do."""
    return client.eval(load(script).source.decode(), len(keys.all), *keys.all, *arguments)


def ask(keys: Keys, token: bytes, ticket: bytes = b"") -> tuple[Keys, str, tuple[Argument, ...]]:
    script = "lock/acquire" if keys is LOCK else "permits/acquire"
    return keys, script, (token, TTL, ticket, 0, *((0,) if keys is LOCK else (1, 1)))


def ticket(keys: Keys, token: bytes, inbox: bytes = INBOX, number: int = 1) -> bytes:
    return ticket_member(inbox, number, 500, token)


def everything(client: Any) -> dict[bytes, Any]:
    return {key: client.dump(key) for key in client.scan_iter()}


def renewal(keys: Keys, token: bytes) -> tuple[Any, ...]:
    """Return the script that renews, and its arguments."""
    return ("lock/renew", token, TTL) if keys is LOCK else ("permits/renew", token, TTL, 1)


# Every talk, after "a" has taken what there is.
TALKS: dict[str, tuple[Keys, str, tuple[Argument, ...]]] = {
    "link/read": (LOCK, "link/read", (pack((b"GET", LOCK.all[0])) + pack((b"ZCARD", LOCK.all[1])),)),
    "lock/acquire": ask(LOCK, b"b", ticket(LOCK, b"b")),
    "lock/acquire_all": (LOCK, "lock/acquire_all", (TTL, b"b", b"1")),
    "lock/release": (LOCK, "lock/release", (b"a", b"", b"0")),
    "lock/renew": (LOCK, "lock/renew", (b"a", TTL)),
    "lock/force_release": (LOCK, "lock/force_release", ()),
    "lock/mark": (MARK, "lock/mark", (b"a", b"new", TTL, b"")),
    "permits/acquire": ask(SEM, b"b", ticket(SEM, b"b")),
    "permits/release": (SEM, "permits/release", (b"a", b"", b"0")),
    "permits/renew": (SEM, "permits/renew", (b"a", TTL, 1)),
    "permits/resize": (SEM, "permits/resize", (3,)),
}


def prepare(client: Any, keys: Keys) -> None:
    if keys is RW:
        run(client, RW, "permits/acquire", b"a", TTL, b"", 0, WRITER_WEIGHT, WRITER_WEIGHT)
    else:
        lock, acquire, words = ask(LOCK if keys is MARK else keys, b"a")
        run(client, lock, acquire, *words)


def test_every_script_is_here_but_those_of_the_compatible_lock() -> None:
    assert set(TALKS) == set(DECISIONS)


CHANGES: dict[str, Callable[[Any, Keys], object]] = {
    "the lock is taken away": lambda client, keys: client.delete(keys.all[0]),
    "somebody comes": lambda client, keys: (
        client.zadd(keys.all[1 if keys is LOCK else 2], {"somebody": 1})
        if keys is not MARK
        else client.set(keys.all[1], "somebody")
    ),
    "all is lost": lambda client, keys: client.flushall(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", TALKS)
def test_overtaken(client: Any, name: str, change: Callable[[Any, Keys], object]) -> None:
    """P1, P2, P4: whatever changes between the reading and EXEC, nothing is executed, and another attempt decides."""
    keys, script, arguments = TALKS[name]
    prepare(client, keys)
    after: list[dict[bytes, Any]] = []

    def overtake(words: Words) -> None:
        if words == (b"MULTI",):
            change(client, keys)
            after.append(everything(client))

    assert conduct(client, converse(said(keys, script, *arguments)), meanwhile=overtake) is CONFLICT
    assert [everything(client)] == after, "something was written"
    assert conduct(client, converse(said(keys, script, *arguments))) is not CONFLICT


@pytest.mark.parametrize("asked", ["lock/renew", "lock/acquire", "lock/release"])
def test_over_between_reading_and_exec(client: Any, asked: str) -> None:
    """P1, P6: who held the lock when it was read and does not at EXEC: found out, though nobody touched the key."""
    client.set(LOCK.name, "a", px=2000)
    ends = microseconds(client.time()) + 2_001_000

    def wait(words: Words) -> None:
        while words == (b"MULTI",) and microseconds(client.time()) < ends:
            time.sleep(0.01)

    call = said(*_call(TALKS[asked]))
    assert conduct(client, converse(call), meanwhile=wait) is CONFLICT
    again: Any = CONFLICT
    for _ in range(2):  # Redis 6.2 takes it for a change once more, when our own GET removes the key
        if again is CONFLICT:
            again = conduct(client, converse(call))
    assert again > 0 if asked == "lock/acquire" else again == 0 or again[0] == 0


@pytest.mark.parametrize("keys", [LOCK, SEM], ids=["lock", "semaphore"])
def test_a_waiter_dies_between_the_look_and_its_grant(client: Any, keys: Keys) -> None:
    """P1: it keeps what it was granted until that ends, as it may come back; the next one is told when."""
    prepare(client, keys)
    _, acquire, _ = ask(keys, b"")
    asked: dict[bytes, tuple[Argument, ...]] = {}
    with client.pubsub() as dying, client.pubsub() as living:
        for number, (pubsub, token) in enumerate(((dying, b"b"), (living, b"c")), 1):
            inbox = INBOX + token
            pubsub.subscribe(inbox)
            assert pubsub.get_message(timeout=5)["type"] == "subscribe"
            _, _, asked[token] = ask(keys, token, ticket(keys, token, inbox, number))
            assert run(client, keys, acquire, *asked[token])[0] == 2
        told: list[int] = []

        def die_and_come_back(words: Words) -> None:
            if words == (b"MULTI",) and dying.subscribed:
                dying.unsubscribe()
                assert dying.get_message(timeout=5)["type"] == "unsubscribe"
            elif words == (b"MULTI",):  # of another transaction, should there be one
                told.append(run(client, keys, acquire, *asked[b"b"])[0])

        release = said(keys, "lock/release" if keys is LOCK else "permits/release", b"a", b"", b"0")
        assert conduct(client, converse(release), meanwhile=die_and_come_back) == 1
        told.append(run(client, keys, acquire, *asked[b"b"])[0])
        assert told == [3]  # OWN: from now on it is used
        assert [run(client, keys, *renewal(keys, token))[0] == 1 for token in (b"b", b"c")] == [True, False]
        assert living.get_message(timeout=5)["data"].split()[:2] == [b"2", b"0"]


@pytest.mark.parametrize("name", TALKS)
def test_a_key_of_another_type(client: Any, name: str) -> None:
    """D15: an error, and nothing is changed, whichever key it is."""
    keys, script, arguments = TALKS[name]
    for key in keys.all:
        client.flushall()
        prepare(client, keys)
        client.delete(key)
        client.lpush(key, "a list")
        before = everything(client)
        if script == "link/read":
            continue  # an error is a reply among others
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            conduct(client, converse(said(keys, script, *arguments)))
        assert everything(client) == before


def test_two_thousand_that_are_over(client: Any) -> None:
    """They are dropped a thousand at a time, before the decision."""
    for number in range(2000):
        run(client, SEM, "permits/acquire", b"o%d" % number, TTL, b"", 0, 1, 3000)
    client.zadd(SEM.all[0], {b"o%d" % number: 1 for number in range(2000)}, xx=True)
    fence = conduct(client, converse(said(SEM, "permits/acquire", b"b", TTL, b"", 0, 3000, 3000)))
    assert fence > 0
    assert client.zcard(SEM.all[0]) == 1
    assert int(client.hget(SEM.all[1], "used")) == 3000


@pytest.mark.parametrize("waits", [False, True])
def test_two_thousand_that_are_over_and_no_memory(client: Any, waits: bool) -> None:
    """Nothing can be dropped: an error as for any other write, but a request that waits already goes on waiting."""
    prepare(client, SEM)
    ours = ticket(SEM, b"b", b"")
    if waits:
        run(client, *ask(SEM, b"b", ours)[:2], *ask(SEM, b"b", ours)[2])
    client.zadd(SEM.all[0], {b"o%d" % number: 1 for number in range(2000)})
    client.hset(SEM.all[1], mapping={b"=o%d" % number: "1 1" for number in range(2000)})
    before = everything(client)
    client.config_set("maxmemory", 1)
    try:
        said_so = said(*ask(SEM, b"b", ours)[:2], *ask(SEM, b"b", ours)[2])
        if waits:
            assert conduct(client, converse(said_so))[0] == Outcome.QUEUED
        else:
            with pytest.raises(ReplyError, match="OOM"):
                conduct(client, converse(said_so))
    finally:
        client.config_set("maxmemory", 0)
    assert everything(client) == before


@pytest.mark.parametrize("keys", [LOCK, SEM], ids=["lock", "semaphore"])
def test_out_of_memory(client: Any, keys: Keys) -> None:
    """D10: nothing is granted; a lock is renewed and released all the same, and its first waiter is told to look."""
    prepare(client, keys)
    mine = ticket(keys, b"b")
    run(client, *ask(keys, b"b")[:2], *ask(keys, b"b", mine)[2])
    with client.pubsub() as pubsub:
        pubsub.subscribe(INBOX)
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(ReplyError, match="OOM"):
                conduct(client, converse(said(*_call(ask(keys, b"c", ticket(keys, b"c", INBOX, 2))))))
            assert conduct(client, converse(said(*_call(ask(keys, b"b", mine)))))[:2] == (2, 0), "it goes on waiting"
            if keys is SEM or client.info("server")["redis_version"].startswith("6."):  # 6.2 refuses all in MULTI
                release = said(keys, "lock/release" if keys is LOCK else "permits/release", b"a", b"", b"0")
                for call in (said(keys, *renewal(keys, b"a")), release):
                    with pytest.raises(ReplyError, match="OOM"):
                        conduct(client, converse(call))
                return
            assert conduct(client, converse(said(keys, "lock/renew", b"a", TTL)))[0] == 1
            assert conduct(client, converse(said(keys, "lock/release", b"a", b"", b"0"))) == 1
            assert client.get(LOCK.name) is None
            assert pubsub.get_message(timeout=5)["data"].split()[:2] == [b"1", b"-1"]
            assert conduct(client, converse(said(*_call(ask(keys, b"b", mine)))))[0] == 2
        finally:
            client.config_set("maxmemory", 0)
        assert conduct(client, converse(said(*_call(ask(keys, b"b", mine))))) > 0


SHARER, SHARED = b"host:1:ab:7~", b"rsa:ab"


@pytest.mark.parametrize("keys", [LOCK, SEM], ids=["lock", "semaphore"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_holder_that_shares_is_notified_of_a_waiter(client: Any, keys: Keys, dies: bool) -> None:
    """And it does not matter whether he hears it: it is no grant that would be taken back."""
    run(client, *_call(ask(keys, SHARER)))
    with client.pubsub() as pubsub:
        pubsub.subscribe(SHARED)
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"

        def die(words: Words) -> None:
            if dies and words == (b"MULTI",):
                pubsub.unsubscribe()
                assert pubsub.get_message(timeout=5)["type"] == "unsubscribe"

        # Its ticket has the inbox and the number of the holder.
        call = said(*_call(ask(keys, b"b", ticket(keys, b"b", SHARED, 7))))
        assert conduct(client, converse(call), meanwhile=die)[0] == 2
        if not dies:
            assert pubsub.get_message(timeout=5)["data"].split()[:2] == [b"7", b"-2"]
        assert run(client, keys, *renewal(keys, SHARER), 0)[::2] == [1, 0], "it holds what it held"
        code, _, more, waiting = conduct(client, converse(said(keys, *renewal(keys, SHARER), 9)))
        assert (code, more > 0, waiting) == (1, True, 1)


@pytest.mark.parametrize("keys", [LOCK, SEM], ids=["lock", "semaphore"])
@pytest.mark.parametrize("talks", [False, True], ids=["script", "talk"])
def test_a_lease_that_ends_sooner_is_announced_to_who_listens(client: Any, keys: Keys, talks: bool) -> None:
    """P3: the first waiter is dead, so the second one is told in how many milliseconds something is free."""
    prepare(client, keys)
    with client.pubsub() as living:
        living.subscribe(INBOX)
        assert living.get_message(timeout=5)["type"] == "subscribe"
        for number, (token, inbox) in enumerate(((b"b", b"rsa:dead"), (b"c", INBOX)), 1):
            assert run(client, *_call(ask(keys, token, ticket(keys, token, inbox, number))))[0] == Outcome.QUEUED
        script, token, _, *more = renewal(keys, b"a")
        words = (token, TTL // 2, *more)
        found = conduct(client, converse(said(keys, script, *words))) if talks else run(client, keys, script, *words)
        assert found[0] == 1
        told = living.get_message(timeout=5)
        assert told is not None, "a message is missing"
        number, fence, _, free_in = map(int, told["data"].split())
        assert (number, fence) == (2, 0)
        assert 0 < free_in <= TTL // 2


def heard(client: Any, call: Call) -> list[bytes]:
    """Carry out a talk and return the commands of it that read."""
    found: list[bytes] = []
    conduct(client, converse(call), meanwhile=lambda words: found.append(bytes(words[0])))
    return found[: found.index(b"MULTI")]


def test_holders_that_share_are_looked_for_only_when_a_request_has_to_wait(client: Any) -> None:
    """And only then: neither where nobody shares, nor for one that is granted immediately or does not wait."""
    limit = (1, 2)
    asked = [said(SEM, "permits/acquire", b"t%d" % n, TTL, ticket(SEM, b"t%d" % n), 0, *limit) for n in range(4)]
    run(client, SEM, "permits/acquire", SHARER, TTL, b"", 0, *limit)
    at_once = heard(client, asked[0])
    assert at_once.count(b"HMGET") == 1
    assert heard(client, said(SEM, "permits/acquire", b"x", TTL, b"", 0, *limit)) == at_once
    assert heard(client, asked[1]) == [*at_once, b"PUBSUB", b"HMGET"]
    client.delete(*SEM.all)
    run(client, SEM, "permits/acquire", b"y", TTL, b"", 0, 2, 2)
    assert heard(client, asked[2]) == at_once


def test_the_first_holders_that_share_are_notified_whatever_has_expired(client: Any) -> None:
    """As by the script: what is over is none of the first."""
    limit, keys = 300, SEM
    size = (1, limit)
    for number in range(80):
        run(client, keys, "permits/acquire", b"o%d" % number, TTL, b"", 0, *size)
    client.zadd(keys.all[0], {b"o%d" % number: 1 for number in range(80)}, xx=True)
    for number in range(MAX_NOTIFIED + 1):
        token = b"host:1:%x:%d~" % (number, number + 1)
        client.zadd(keys.all[0], {token: (1 << 52) + number})
        client.hset(keys.all[1], b"=" + token, b"1 5")
        client.hincrby(keys.all[1], "used", 1)
    client.hset(keys.all[1], "shared", 1)
    told: list[Words] = []
    call = said(keys, "permits/acquire", b"b", TTL, ticket(keys, b"b"), 0, limit, limit)
    with client.pubsub() as pubsub:
        inboxes = [b"rsa:%x" % number for number in range(MAX_NOTIFIED + 1)]
        pubsub.subscribe(*inboxes)
        for _ in inboxes:
            assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        reply = conduct(client, converse(call), meanwhile=told.append)
    assert reply[0] == 2
    assert [words[1] for words in told if words[0] == b"PUBLISH"] == inboxes[:MAX_NOTIFIED]


def _call(asked: tuple[Keys, str, tuple[Argument, ...]]) -> Any:
    keys, script, arguments = asked
    return (keys, script, *arguments)


def test_a_holder_that_shares_is_notified_although_others_end_first(client: Any) -> None:
    """Not only those are told that a decision needs to know when to look again; and not for what was undone."""
    for token in (b"first", b"second", SHARER):
        run(client, SEM, "permits/acquire", token, TTL, b"", 0, 1, 3)
    run(client, SEM, "permits/release", b"host:1:cd:8~", b"", b"1")
    with client.pubsub() as pubsub:
        pubsub.subscribe(SHARED, b"rsa:cd")
        assert [pubsub.get_message(timeout=5)["type"] for _ in range(2)] == ["subscribe"] * 2
        words = (b"b", TTL, ticket(SEM, b"b"), 0, 1, 3)
        assert conduct(client, converse(said(SEM, "permits/acquire", *words)))[0] == Outcome.QUEUED
        client.publish(SHARED, "the end")
        assert pubsub.get_message(timeout=5)["data"].split()[:2] == [b"7", b"-2"]
        assert pubsub.get_message(timeout=5)["data"] == b"the end"
