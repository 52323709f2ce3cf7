"""What random histories have in common: commands run on a server and by the rules, and compared after each.

The server's TIME is replaced by ours. Each command runs twice (P4). Compared are the reply, the messages that arrive,
and all that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from redis_sync_aio.embedded import EmbeddedServer

from .inside import ASK_AGAIN, QUEUE_TTL_MS, Decision, Message, Outcome, S, Ticket
from .options import OPTIONS

INBOXES = (b"rsa:1", b"rsa:2")
NOBODY = b"rsa:0"
START = 1_800_000_000_000_000
SECOND = 1_000_000

Kind = Literal["pushed", "sharing", "dead", "polling", "impatient", "identity"]
"""How a request waits, or whose it is."""
KINDS: tuple[Kind, ...] = ("pushed", "pushed", "sharing", "sharing", "dead", "polling", "impatient", "identity")
A = TypeVar("A")
MUTE = st.sampled_from([False] * 9 + [True])
ODD = (b"a|b", b"\x00\xff", b"a b\r\nc", b"%d %s", b"0", b"limit", b"=")
"""Tokens: they may hold any bytes."""

PROFILE = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=32,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
SHARE = 1 if OPTIONS.run_ci else 4
"""Without --run-ci a quarter of the random histories are compared: the same first quarter each time."""


def most_waiting(number: int) -> int | None:
    """Return behind how many others the request of that number waits at most: mostly any number."""
    return 2 if number % 5 == 0 else None


def odd_token(number: int) -> bytes:
    """Return the token of the request of that number."""
    return ODD[number % len(ODD)] + (b"%d" % number if number >= len(ODD) else b"")


class Pointless(Exception):
    """A step that there is nothing to do for. (`assume` would throw away the history so far.)"""


def only_if(condition: object) -> None:
    """Go on with this step only if so."""
    if not condition:
        raise Pointless


class Compared(RuleBasedStateMachine, Generic[S]):
    """Commands in random order, on both."""

    client: ClassVar[Any]
    muted: ClassVar[Any]
    """A client that may not publish."""
    commands: ClassVar[Mapping[str, int]]
    """Names of methods, and how often each comes."""
    watching: ClassVar[bool] = False
    """Run with WATCH, not by scripts."""
    line: ClassVar[tuple[bytes, bytes]]
    """The keys QUEUE and POLLS."""
    model: S
    """What should be on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.fence = self.later = 0
        self.came: dict[bytes, int] = {}  # when each ticket entered the queue; its repeated request says so

    @contextmanager
    def kept_in(self, *keys: bytes) -> Iterator[Callable[[bytes, Decision[S]], None]]:
        """Yield what is called with a ticket and the decision: who is queued keeps these keys for their whole ttl.

        It also remembers, as a process does, when its request entered the queue.
        """
        before = self.model
        for key in keys:
            self.client.pexpire(key, QUEUE_TTL_MS // 2)

        def queued(ticket: bytes, decision: Decision[S]) -> None:
            if isinstance(decision.reply, tuple) and decision.reply[0] == Outcome.QUEUED:
                self.came.setdefault(ticket, decision.reply[3])
                if self.watching and self.model == replace(before, now=self.now):
                    return  # in the same moment nothing has to be written
                for key in keys:
                    if self.watching and key == self.line[1] and self.model.polls == before.polls:
                        continue  # asked again in the same millisecond
                    assert self.client.pttl(key) > 0.9 * QUEUE_TTL_MS, "a ticket ends before its owner asks again"

        yield queued

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.pubsub = self.client.pubsub()
        for inbox in INBOXES:
            self.pubsub.subscribe(inbox)
            assert self.message()["type"] == "subscribe"

    def teardown(self) -> None:
        if not hasattr(self, "pubsub"):
            return
        try:
            for inbox in set(INBOXES) - self.model.deaf:
                self.client.publish(inbox, "the end")
                assert self.message()["data"] == b"the end", "a message too many"
        finally:
            self.pubsub.close()  # else it would be somebody who listens, in the next history

    def message(self) -> dict[str, Any]:
        found = self.pubsub.get_message(timeout=1)
        assert found is not None, "a message is missing"
        return dict(found)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One rule instead of many: hypothesis would leave some of them out of each history."""
        names = [name for name, weight in self.commands.items() for _ in range(weight)]
        with suppress(Pointless):
            getattr(self, data.draw(st.sampled_from(names)))(data)

    def expected(self, decide: Callable[[S], Decision[S]], mute: bool) -> Decision[S]:
        """Return the decision of the rules."""
        before = replace(self.model, now=self.now)
        if mute and not (self.watching and not decide(before).messages):  # who has nothing to tell does not notice it
            before = replace(before, mute=True)
        return decide(before)

    def heard(self, decision: Decision[S]) -> list[Message]:
        """Return the messages that arrive: nobody hears those to a dead inbox, which ask its owner to ask again."""
        deaf = [told for told in decision.messages if told.inbox in self.model.deaf]
        assert all(int(told.payload.split()[1]) == ASK_AGAIN for told in deaf), "a grant to nobody"
        return [told for told in decision.messages if told not in deaf]

    def can_take(self, before: S, member: bytes, ticket: Ticket) -> bool:
        """Return whether the owner of a ticket can take what is free: it listens, or asks in time."""
        until = before.polls.get(member)
        asks = until is not None and until * 1000 > self.now
        if not ticket.inbox:
            return asks
        listens = ticket.inbox in INBOXES and ticket.inbox not in before.deaf
        return listens and (asks or not ticket.later or until is None)

    # -- what happens besides commands --------------------------------------------------------------------

    def come_later(self, data: st.DataObject) -> None:
        """A ticket of a later layout comes, whose owner listens, is dead, or polls."""
        self.later += 1
        inbox = data.draw(st.sampled_from([*INBOXES, NOBODY, b""]))
        member = b"%b|2;%d|a new|form" % (inbox, 1000 + self.later)
        queue, polls = self.line
        place = max([self.now, *(place + 1 for place in self.model.places.values())])
        self.client.zadd(queue, {member: place})
        self.client.pexpire(queue, QUEUE_TTL_MS)
        until = dict(self.model.polls)
        if not inbox:
            until[member] = self.now // 1000 + 5
            self.client.zadd(polls, {member: until[member]})
            self.client.pexpire(polls, QUEUE_TTL_MS)
        queued = (*self.model.queue, member)
        self.model = replace(self.model, queue=queued, places={**self.model.places, member: place}, polls=until)

    def ends(self) -> list[int]:
        """Return when something ends, in microseconds."""
        return [ms * 1000 for ms in self.model.polls.values()]

    def let_time_pass(self, data: st.DataObject) -> None:
        """Also backwards, and to the very moment when something ends."""
        moments: list[int] = sorted(end + more for end in self.ends() for more in (-1, 0, 1) if end + more > self.now)
        # P8 cannot survive a lost fence and a clock that goes back.
        back = SECOND if self.model.fence >= self.fence else 0
        self.now = data.draw(st.sampled_from([self.now + 1, self.now + 5000, self.now - back, *moments[:6]]))

    def die_or_come_back(self, data: st.DataObject) -> None:
        inbox = data.draw(st.sampled_from(sorted(self.model.deaf - {NOBODY}) or INBOXES))
        if inbox in self.model.deaf:
            self.pubsub.subscribe(inbox)
        else:
            self.pubsub.unsubscribe(inbox)
        assert self.message()["channel"] == inbox
        self.model = replace(self.model, deaf=self.model.deaf ^ {inbox})

    def lose(self, data: st.DataObject, lost: Mapping[bytes, Mapping[str, Any]]) -> None:
        """One of these keys is lost, and with it that part of the model."""
        key = data.draw(st.sampled_from(list(lost)))
        self.client.delete(key)
        self.model = replace(self.model, **lost[key])
        self.now = max(self.now, self.fence + 1)


def likely(data: st.DataObject, found: list[A], all_of_them: list[A]) -> A:
    """Draw one of those found, or else one of the latest."""
    only_if(all_of_them)
    return data.draw(st.sampled_from(found * 4 + all_of_them[-3:]))


def notice(*machines: type[Compared[Any]]) -> bool:
    """Return whether histories of one of these machines find a difference, whatever broken scripts do to them."""
    many = settings(PROFILE, max_examples=12 * PROFILE.max_examples)  # of most mutants the first ones are enough
    for machine in machines:
        try:
            run_state_machine_as_test(machine, settings=many)
        except (AssertionError, TypeError, ValueError, redis.RedisError, Flaky):
            return True
    return False


@contextmanager
def private_server() -> Iterator[Any]:
    """A server of its own for all histories of a module; yields a client."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "muted", "on", "nopass", "~*", "+@all", "resetchannels")
        with redis.Redis.from_url(server.url, username="muted", password="any") as muted:
            Compared.client, Compared.muted = client, muted
            yield client
