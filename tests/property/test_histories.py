"""Random histories of a lock, run by the scripts on a server and by a model in Python; compared after each command.

Each command runs twice (P4): the second run must change nothing. Beside the model there are the promises, read
off the server alone: fences rise strictly, grants pass over nobody who lives, the pushes tell of exactly
the hand-overs that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import redis
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from redis_sync_aio._engine.lua import ticket_member
from redis_sync_aio._keys import lock_keys
from redis_sync_aio._scripts import load
from redis_sync_aio.embedded import EmbeddedServer

KEYS = lock_keys(b"h")
TTL = 600_000
POLL = 600_000
HEARD, DEAF = b"rsa:heard", b"rsa:deaf"

Kind = Literal["pushed", "deaf", "polling", "impatient", "identity"]
KINDS: tuple[Kind, ...] = ("pushed", "pushed", "deaf", "polling", "impatient", "identity")
BUSY, GRANTED, QUEUED, OWN, SPENT = range(5)


@dataclass(frozen=True)
class Actor:
    """One request: its token, its ticket, and how it waits."""

    number: int
    kind: Kind

    @property
    def token(self) -> bytes:
        return b"me" if self.kind == "identity" else b"t%d" % self.number

    @property
    def ticket(self) -> bytes:
        if self.kind == "impatient":
            return b""
        inbox = {"pushed": HEARD, "identity": HEARD, "deaf": DEAF, "polling": b""}[self.kind]
        return ticket_member(inbox, self.number, TTL, self.token)


@dataclass
class Model:
    """The lock's rules, without a server: who holds, who waits, to whom the last fence went."""

    holder: bytes | None = None
    last: bytes | None = None
    queue: list[Actor] = field(default_factory=list)
    dead: set[Actor] = field(default_factory=set)
    pushed: list[int] = field(default_factory=list)

    def settle(self, mine: Actor | None) -> str:
        """Give it to the first living waiter ahead of ``mine``."""
        while self.queue and self.queue[0] != mine:
            head = self.queue[0]
            if head.kind == "polling":
                if head not in self.dead:
                    return "reserved"
                self.queue.pop(0)
                continue
            self.queue.pop(0)
            self.last = head.token  # a fence is spent on it, heard or not
            if head.kind != "deaf":
                self.holder = head.token
                self.pushed.append(head.number)
                return "granted"
        return "free"

    def withdraw(self, actor: Actor) -> None:
        if actor in self.queue and actor.ticket:
            self.queue.remove(actor)

    def acquire(self, actor: Actor) -> int:
        if self.holder is None and self.last == actor.token and actor.kind != "identity":
            self.withdraw(actor)
            return SPENT
        if self.holder == actor.token:
            self.withdraw(actor)
            return OWN
        if self.holder is None and self.settle(actor) == "free":
            self.withdraw(actor)
            self.holder = self.last = actor.token
            return GRANTED
        if not actor.ticket:
            return BUSY
        if actor not in self.queue:
            self.queue.append(actor)
        if actor.kind == "polling":
            self.dead.discard(actor)
        return QUEUED

    def release(self, actor: Actor, undo: bool = False) -> int:
        held = self.holder
        self.withdraw(actor)
        if held is not None and held != actor.token:
            return 2
        next_one = self.settle(None)
        if next_one != "granted":
            self.holder = None
        if undo and held is None and next_one == "free":
            self.last = actor.token  # a copy of its request that is still under way is to be spent
        return 0 if held is None else 1

    def renew(self, actor: Actor) -> int:
        if self.holder is None:
            self.settle(None)
            return 0
        return 1 if self.holder == actor.token else 2

    def force(self) -> int:
        held = self.holder is not None
        if self.settle(None) != "granted":
            self.holder = None
        return int(held)


class History(RuleBasedStateMachine):
    """Commands in random order, on both."""

    client: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.actors: list[Actor] = []
        self.fence = 0
        self.pushes: list[tuple[int, int]] = []

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.pubsub = self.client.pubsub()
        self.pubsub.subscribe(HEARD)
        assert (self.pubsub.get_message(timeout=5) or {})["type"] == "subscribe"

    def teardown(self) -> None:
        if not hasattr(self, "pubsub"):
            return
        self.client.publish(HEARD, "the end")
        while (payload := (self.pubsub.get_message(timeout=5) or {})["data"]) != b"the end":
            number, fence, *_ = payload.split()
            if int(fence):
                self.pushes.append((int(number), int(fence)))
        self.pubsub.close()
        assert [number for number, _ in self.pushes] == self.model.pushed, "the hand-overs, in order, once each"
        fences = [fence for _, fence in self.pushes]
        assert fences == sorted(set(fences))

    # -- the commands ------------------------------------------------------------------------------------

    def run(self, script: str, *arguments: bytes | int) -> Any:
        return self.client.eval(load(script).source.decode(), 4, *KEYS.all, *arguments)

    def state(self) -> object:
        """All of it but times."""
        queue = self.client.zrange(KEYS.queue, 0, -1, withscores=True)
        return (self.client.get(KEYS.name), self.client.get(KEYS.fence), queue, self.client.zrange(KEYS.polls, 0, -1))

    def both(self, expected: int, script: str, *arguments: bytes | int) -> Any:
        """Run it, compare the answer with the model's, and run it again."""
        reply = self.run(script, *arguments)
        code = reply[0] if isinstance(reply, list) else GRANTED if script == "acquire" else reply
        assert code == expected, (script, arguments, reply)
        self.everything_ends_by_itself()
        before = self.state()
        self.run(script, *arguments)
        assert self.state() == before, f"P4: {script} {arguments} run again changed something"
        return reply

    def ask(self, actor: Actor) -> None:
        arguments = (
            actor.token,
            TTL,
            actor.ticket,
            POLL if actor.kind == "polling" else 0,
            int(actor.kind == "identity"),
        )
        outcome = self.model.acquire(actor)
        reply = self.both(outcome, "acquire", *arguments)
        if outcome == GRANTED:
            assert reply > self.fence, "P8"
        elif outcome == OWN:
            assert reply[1] == self.fence, "P4: the same grant, the same fence"

    @rule(kind=st.sampled_from(KINDS))
    def request(self, kind: Kind) -> None:
        actor = Actor(len(self.actors) + 1, kind)
        self.actors.append(actor)
        self.ask(actor)

    def one(self, data: st.DataObject) -> Actor:
        return data.draw(st.sampled_from(self.actors))

    def likely_holder(self, data: st.DataObject) -> Actor:
        held = [actor for actor in self.actors if actor.token == self.model.holder]
        return data.draw(st.sampled_from(held * 4 * len(self.actors) + self.actors))

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.model.queue * 3 + self.actors[-3:]))
        # A copy of a request that is long over (its token forgotten as the last one) would be a new request.
        if actor in self.model.queue or actor.token in (self.model.holder, self.model.last):
            self.ask(actor)

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        actor = self.likely_holder(data)
        # An identity that also waits for itself elsewhere can not be told from that other one: see release.lua.
        assume(not any(one.token == actor.token and one != actor for one in self.model.queue))
        self.both(self.model.release(actor), "release", actor.token, actor.ticket, 0)

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A cancelled waiter takes back its token and its ticket."""
        actor = data.draw(st.sampled_from(self.model.queue))
        self.both(self.model.release(actor, undo=True), "release", actor.token, actor.ticket, 1)
        assert actor not in self.model.queue

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        actor = self.likely_holder(data)
        self.both(self.model.renew(actor), "renew", actor.token, TTL)

    @rule()
    def force(self) -> None:
        assert self.run("force") == self.model.force()

    @precondition(lambda self: self.model.holder)
    @rule()
    def expire(self) -> None:
        self.client.delete(KEYS.name)
        self.model.holder = None

    @precondition(lambda self: any(actor.kind == "polling" for actor in self.model.queue))
    @rule(data=st.data())
    def stop_polling(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from([actor for actor in self.model.queue if actor.kind == "polling"]))
        self.client.zadd(KEYS.polls, {actor.ticket: 1})
        self.model.dead.add(actor)

    # -- what holds at any time --------------------------------------------------------------------------

    @invariant()
    def the_server_agrees_with_the_model(self) -> None:
        assert self.client.get(KEYS.name) == self.model.holder, "P1"
        assert self.client.zrange(KEYS.queue, 0, -1) == [actor.ticket for actor in self.model.queue], "P2"

    @invariant()
    def fences_rise(self) -> None:
        stored = self.client.get(KEYS.fence)
        if stored is not None:
            assert isinstance(stored, bytes)
            fence, token = stored.split(b" ", 1)
            assert token == self.model.last
            assert int(fence) >= self.fence, "P8"
            self.fence = int(fence)

    @invariant()
    def nobody_polls_who_does_not_wait(self) -> None:
        polls = set(self.client.zrange(KEYS.polls, 0, -1))
        assert polls <= {actor.ticket for actor in self.model.queue}

    @invariant()
    def everything_ends_by_itself(self) -> None:
        assert all(self.client.pttl(key) != -1 for key in KEYS.all)


@pytest.fixture(scope="module")
def private() -> Iterator[redis.Redis]:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        yield client


PROFILE = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize=True,
)


def test_random_histories_agree_with_the_model(private: redis.Redis) -> None:
    History.client = private
    run_state_machine_as_test(History, settings=PROFILE)


BUGS: dict[str, Callable[[Model], object]] = {
    "last come, first served": lambda model: model.queue.reverse(),
    "the holder is forgotten": lambda model: setattr(model, "holder", None),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_comparison_notices_a_difference(private: redis.Redis, bug: Callable[[Model], object]) -> None:
    """A model that goes wrong in its third request must be found out."""

    class Wrong(History):
        @precondition(lambda self: len(self.model.queue) >= 2)
        @rule()
        def go_wrong(self) -> None:
            bug(self.model)

    Wrong.client = private
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=settings(PROFILE, max_examples=30))
