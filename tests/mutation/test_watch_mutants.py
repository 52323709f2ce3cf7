"""Mutants of the talks: each wrong step of reading, writing or committing has to be found out.

The check: one seeded history, run by the scripts in one database and by talks in another, must leave the same keys,
give the same replies and tell the same inboxes; and talks that are overtaken must not write.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from redis_sync_aio._engine import permit_rules, queue_rules, watch_dialogue, watch_lock, watch_permits
from redis_sync_aio.embedded import EmbeddedServer

from ..engine import test_talks
from ..support.executions import Execution, by_script, by_watch
from ..support.inside import Keys, lock_keys, permit_keys, ticket_member
from ..support.mutants import Mutant

LOCK, SEM = lock_keys(b"h"), permit_keys(b"h", "sem")
INBOXES = (b"rsa:1", b"rsa:2", b"rsa:0", b"")
START, STEPS = 1_800_000_000_000_000, 200


class Run:
    """A history in a database of its own."""

    def __init__(self, client: Any, keys: Keys, execute: Execution) -> None:
        self.client, self.keys, self.execute = client, keys, execute
        self.pubsub = client.pubsub()
        for inbox in INBOXES[:2]:
            self.pubsub.subscribe(inbox)
            assert self.pubsub.get_message(timeout=5)["type"] == "subscribe"

    def step(self, script: str, arguments: tuple[Any, ...], now: int) -> list[Any]:
        """Return all that it came to: the reply, the messages, the keys and about how long they last."""
        try:
            reply = self.execute(self.client, script, self.keys, arguments, now)
        except redis.ResponseError as error:
            reply = str(error)
        self.client.publish(INBOXES[0], "the end")
        told = []
        while (message := self.pubsub.get_message(timeout=5))["data"] != b"the end":
            told.append((message["channel"], message["data"]))
        ends = [self.client.pttl(key) for key in self.keys.all]
        # Those of permits are counted by the test's clock, which goes ahead, and run by the real one.
        keys: list[Any] = [_coarse(ms) if self.keys is LOCK else min(ms, 500_000) for ms in ends]
        for key in self.keys.all:
            kind = self.client.type(key)
            keys.append(
                self.client.get(key)
                if kind == b"string"
                else self.client.hgetall(key)
                if kind == b"hash"
                else self.client.zrange(key, 0, -1, withscores=True)
            )
        return [_coarse(reply), told, keys]


def _coarse(reply: Any) -> Any:
    """Milliseconds that run by themselves are the same if they are near."""
    if isinstance(reply, (list, tuple)):
        return [_coarse(one) for one in reply]
    return (reply + 5000) // 10_000 if isinstance(reply, int) and 10_000 < reply < 10**9 else reply


def commands(keys: Keys, seed: int) -> Iterator[tuple[str, tuple[Any, ...], int]]:
    """A history: who comes, looks again, goes, renews; while time passes."""
    draw, now, came = random.Random(seed), START, list[tuple[int, bytes]]()
    lock = keys is LOCK
    prefix = "lock/" if lock else "permits/"
    for number in range(1, STEPS):
        now += draw.choice([1, 1000, 2_000_000])
        what = draw.choice(["come", "come", "come", "again", "go", "go", "undo", "renew", "renew", "other"])
        if what == "come":
            came.append((number, draw.choice(INBOXES)))
        who, inbox = draw.choice(came[-6:]) if came else (number, INBOXES[0])
        shares = inbox and who % 2 > 0
        token, weight = b"host:%b:%d~" % (inbox[4:], who) if shares else b"t%d" % who, who % 3 + 1
        ticket = ticket_member(inbox, who, 22_000, token, 1 if lock else weight)
        if what in ("come", "again"):
            more = (0,) if lock else (weight, draw.choice([4, 0, 0]))  # 0: the limit that there is
            yield f"{prefix}acquire", (token, 22_000, ticket, 0 if inbox else 22_000, *more), now
        elif what in ("go", "undo"):
            yield f"{prefix}release", (token, ticket, int(what == "undo")), now
        elif what == "renew":
            fences = (draw.choice([0, 5, 4096]),) if shares else ()
            least = () if lock else (1,)
            yield f"{prefix}renew", (token, draw.choice([22_000, 5_000_000]), *least, *fences), now
        elif lock:
            yield "lock/force_release", (), now
        else:
            yield "permits/resize", (draw.choice([3, 4, 4, 6]),), now


def check(server: EmbeddedServer) -> None:
    """Raise if a talk does anything else than the script, or writes when it was overtaken."""
    for keys, seed in ((LOCK, 7), (SEM, 6)):
        with redis.Redis.from_url(server.url, db=1) as one, redis.Redis.from_url(server.url, db=2) as other:
            one.flushall()
            runs = [(Run(one, keys, by_script), one), (Run(other, keys, by_watch), other)]
            for script, arguments, now in commands(keys, seed):
                ends = []
                for run, _ in runs:  # a channel is the same in all databases: the other one hears it, too
                    ends.append(run.step(script, arguments, now))
                    for rest, _ in runs:
                        while rest.pubsub.get_message(timeout=0):
                            pass
                assert ends[0] == ends[1], (script, arguments)
            for run, _ in runs:
                run.pubsub.close()
    with redis.Redis.from_url(server.url) as client:
        for name in ("lock/acquire", "permits/acquire", "lock/release", "permits/release"):
            for change in test_talks.CHANGES.values():
                client.flushall()
                test_talks.test_overtaken(client, name, change)
        for both in (test_talks.LOCK, test_talks.SEM):
            client.flushall()
            test_talks.test_a_waiter_dies_between_the_look_and_its_grant(client, both)
            client.flushall()
            test_talks.test_a_holder_that_shares_is_notified_of_a_waiter(client, both, dies=False)
            client.flushall()
            test_talks.test_a_lease_that_ends_sooner_is_announced_to_who_listens(client, both, talks=True)
        client.flushall()
        test_talks.test_a_holder_that_shares_is_notified_although_others_end_first(client)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.mark.ci
def test_talks_do_what_scripts_do(server: EmbeddedServer) -> None:
    check(server)


LOCK_READ, PERMITS = watch_lock.LockRead, watch_permits.PermitsRead
MUTANTS: dict[str, Mutant] = {
    "the polls are not watched": Mutant(watch_lock, "_read", "for key in keys)", "for key in keys[:1])"),
    "nothing of the permits is watched": Mutant(watch_permits, "_first_asked", '(b"WATCH", *keys)', '(b"PING",)'),
    "pollers are taken for dead": Mutant(watch_lock, "_view", "if until is not None}", "if False}"),
    "a lock without an end": Mutant(watch_lock, "_held", "left == FOREVER_MS", "True"),
    "a lock is not freed": Mutant(watch_lock, "_held", 'return (b"DEL", name)', 'return (b"EXISTS", name)'),
    "a fence is not remembered": Mutant(LOCK_READ, "writes", 'found.append((b"SET", fence', 'id((b"SET", fence'),
    "a lease is not renewed": Mutant(LOCK_READ, "writes", 'found.append((b"PEXPIRE", name', 'id((b"PEXPIRE", name'),
    "all come to the same place": Mutant(watch_dialogue.QueueView, "writes", "max(self.tail + 1, before.now)", "1"),
    "who was granted stays in the queue": Mutant(
        watch_dialogue.QueueView, "writes", 'found.append((b"ZREM", self.queue', 'id((b"ZREM", self.queue'
    ),
    "the queue has no end": Mutant(
        watch_dialogue.QueueView, "writes", 'found.append((b"PEXPIRE", self.queue', 'id((b"PEXPIRE", self.queue'
    ),
    "a permit is not dropped": Mutant(PERMITS, "_drop", '(b"ZREM", permits, *gone), ', ""),
    "a permit is not forgotten": Mutant(PERMITS, "_drop", ', (b"HDEL", state, *(b"=" + token for token in gone))', ""),
    "the sum is not kept": Mutant(PERMITS, "_put", 'b"used", after.used, ', ""),
    "the permits have no end": Mutant(PERMITS, "_put", 'found.append((b"PEXPIRE", permits', 'id((b"PEXPIRE", permits'),
    "they end too soon": Mutant(PERMITS, "_keep", "+ 2 * least if", "if"),
    "the caller's own permit is not read": Mutant(watch_permits, "_read", "held |= seen.named", "held |= {}"),
    "that it is shared is not stored": Mutant(
        PERMITS, "_marks", "if after.shared and not self.before.shared:", "if False:"
    ),
    "that a resize set the limit is not stored": Mutant(
        PERMITS, "_marks", "if after.resized and (self.lost or not self.before.resized):", "if False:"
    ),
    "that a resize set the limit is not read": Mutant(watch_permits, "_read", "resized=seen.resized", "resized=False"),
    "that it is shared is not read": Mutant(watch_permits, "_read", "shared = seen.shared and", "shared = False and"),
    "a tombstone is written like a permit": Mutant(
        watch_permits, "_end", "permit.until if permit.weight else", "permit.until if True else"
    ),
    "a tombstone is taken for a permit": Mutant(watch_permits, "_read", "if seen.ends[name].is_integer()", "if True"),
    "those who share are not looked at": Mutant(watch_permits, "_about", "if view.sharers and", "if False and"),
    "what those hold who share is not read": Mutant(
        watch_permits, "_with_sharers", "{**before.permits, **found}", "before.permits"
    ),
    "no fences are reserved": Mutant(permit_rules, "renew", "if fences is None:", "if True:"),
    "only the first waiter hears of a sooner end": Mutant(
        queue_rules.QueueDraft, "tell_sooner", "[:SOONER_TRIES]", "[:1]"
    ),
    "what is over is not read": Mutant(watch_permits, "_look_closer", "[*over, *(", "[*("),
    "a commit that failed is taken for done": Mutant(
        watch_dialogue, "commit", "return None if replies is None else", "return [] if replies is None else"
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_caught(server: EmbeddedServer, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, ValueError, TypeError, KeyError)):
        check(server)
