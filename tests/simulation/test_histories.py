"""Random histories of a lock, run on a server by scripts or with WATCH, and by `lock_rules.py`; compared after each.

The server's TIME is replaced by ours. Each command runs twice (P4). Compared are the reply, the messages that arrive,
and all that is stored. Besides the rules there are the promises, in plain words: P1, P2, P8, every key has a ttl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from redis_sync_aio._engine import lock_rules as rules
from redis_sync_aio._engine import watch_lock
from redis_sync_aio._engine.lock_rules import LockDecision
from redis_sync_aio._scripts.constants import FOREVER

from ..support.executions import by_script, by_watch
from ..support.histories import (
    INBOXES,
    KINDS,
    MUTE,
    NOBODY,
    PROFILE,
    SHARE,
    START,
    Compared,
    Kind,
    likely,
    most_waiting,
    odd_token,
    only_if,
    private_server,
)
from ..support.inside import (
    BUSY_MS,
    FREE_MS,
    HOUR_MS,
    POLLERS_TICKET,
    LockKeys,
    LockSnapshot,
    Message,
    Outcome,
    Renewed,
    Ticket,
    lock_keys,
    ticket_member,
)
from .attach_rules import attach_lock

KEYS = lock_keys(b"h")
OTHER = lock_keys(b"{h}:other")
BOTH = LockKeys(KEYS.name, KEYS.all + OTHER.all)
AHEAD = (None, 50_000, None, -50_000, 10_000_000, 10_000_001)
"""By how much the least fence that a request asks for is ahead of the clock (µs); None: it asks for none."""
SLOW_MS = 30_000
"""A test is over before so much of a real ttl has passed."""

Rule = Callable[[LockSnapshot], LockDecision]

COMMANDS: Mapping[str, int] = {
    "request": 12,
    "look_again": 4,
    "release": 6,
    "withdraw": 2,
    "renew": 3,
    "force": 1,
    "take_both": 2,
    "end": 3,
    "let_time_pass": 2,
    "die_or_come_back": 2,
    "evict": 1,
    "been_busy": 2,
}


@dataclass(frozen=True)
class Actor:
    """One request: its token, its ticket, and how it waits."""

    number: int
    kind: Kind
    inbox: bytes
    ttl_ms: int

    @property
    def token(self) -> bytes:
        if self.kind == "sharing":
            return b"host:%b:%d~" % (self.inbox[4:], self.number)
        if self.kind == "identity":
            return b"me|\x00\r\n\xff"
        return b"t%d" % self.number if self.kind == "impatient" else odd_token(self.number)

    @property
    def ticket(self) -> bytes:
        if self.kind == "impatient":
            return b""
        inbox = {"dead": NOBODY, "polling": b""}.get(self.kind, self.inbox)
        return ticket_member(inbox, self.number, self.ttl_ms, self.token)


class History(Compared[LockSnapshot]):
    """Commands of a lock, by scripts."""

    commands = COMMANDS
    line = KEYS.queue, KEYS.polls
    execute: ClassVar[Any] = staticmethod(by_script)
    """An `Execution`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LockSnapshot(START, deaf=frozenset({NOBODY}))
        self.actors: list[Actor] = []
        self.held_by: dict[int, bytes] = {}  # whom each fence was granted to

    # -- both, and compare -------------------------------------------------------------------------------

    def stored(self) -> LockSnapshot:
        """Read what is on the server. Times that run by themselves are taken for the model's if they are near."""
        pipe = self.client.pipeline(transaction=False)
        pipe.get(KEYS.name).get(KEYS.fence)
        pipe.zrange(KEYS.queue, 0, -1, withscores=True).zrange(KEYS.polls, 0, -1, withscores=True)
        for key in KEYS.all:
            pipe.pttl(key)
        holder, last, queue, polls, left, in_queue, kept, in_polls = pipe.execute()
        assert -1 not in (in_queue, kept, in_polls), "a key without a ttl"
        return replace(
            self.model,
            now=self.now,
            holder=holder,
            left=_near(left, self.model.left),
            fence=int(last[:16]) if last else 0,
            granted=last[17:] if last else b"",
            kept=_near(kept, self.model.kept),
            queue=tuple(ticket for ticket, _ in queue),
            places={ticket: int(place) for ticket, place in queue},
            polls={ticket: int(until) for ticket, until in polls},
        )

    def once(self, decide: Rule, script: str, arguments: tuple[bytes | int, ...], mute: bool) -> LockDecision:
        decision = self.expected(decide, mute)
        client = self.muted if mute else self.client
        reply = type(self).execute(client, script, KEYS, arguments, self.now)
        self.compare(reply, decision)
        return decision

    def compare(self, reply: Any, decision: LockDecision) -> None:
        expected = decision.reply
        if isinstance(reply, (list, tuple)):
            reply = tuple(reply)
            if len(reply) == 5 and isinstance(expected, tuple):
                reply = (*reply[:2], _near(reply[2], expected[2]), *reply[3:])
        assert reply == expected
        for told in self.heard(decision):
            found = self.message()
            assert Message(found["channel"], found["data"]) == told
        self.model = replace(decision.after, mute=False)
        stored = self.stored()
        if isinstance(reply, tuple) and reply[0] == Outcome.SPENT and stored.kept > HOUR_MS - SLOW_MS:
            self.model = replace(self.model, kept=stored.kept)  # a late copy of a request may shorten it
        assert stored == self.model
        self.model = stored  # with the places of tickets

    def both(
        self, decide: Rule, script: str, *arguments: bytes | int, mute: bool = False, spends: bool = False
    ) -> LockDecision:
        """Run it on both, and again; the second run is to change nothing and to grant nothing.

        But for a fence: each run spends one on who could not be told, and an undo on its token, when that is gone.
        """
        before = replace(self.model, now=self.now)
        first = self.once(decide, script, arguments, mute)
        self.check_promises(before, first)
        again = self.once(decide, script, arguments, mute)
        same = replace(again.after, kept=first.after.kept, mute=first.after.mute)
        if mute or spends:
            same = replace(same, fence=first.after.fence, granted=first.after.granted)
        assert same == first.after, f"P4: {script} again changed something"
        assert all(int(message.payload.split()[1]) <= 0 for message in again.messages), "P4: granted twice"
        return first

    def check_promises(self, before: LockSnapshot, decision: LockDecision) -> None:
        after, reply = decision.after, decision.reply
        granted: list[tuple[int, bytes]] = []
        for _, payload in decision.messages:
            number, fence, *_ = map(int, payload.split())
            if fence > 0:
                (place,) = [i for i, member in enumerate(before.queue) if member.split(b"|")[1] == b"%d" % number]
                ticket = Ticket.parse(before.queue[place])
                assert ticket is not None
                granted.append((fence, ticket.token))
                for member in before.queue[:place]:
                    passed = Ticket.parse(member)
                    assert passed is not None
                    if self.can_take(before, member, passed):
                        assert member in self.own, "P2: somebody living was passed over"
        if self.asking is not None and isinstance(reply, int):
            granted.append((reply, self.asking.token))
            assert before.holder is None, "P1: it was held"
        assert len(granted) <= 1, "P1: granted to two"
        for fence, token in granted:
            assert fence > self.fence, "P8"
            assert after.holder == token
        self.fence = max(self.fence, after.fence)

    asking: Actor | None = None
    own: tuple[bytes, ...] = ()
    """Tickets that the command itself may take out of the queue."""

    # -- the commands ------------------------------------------------------------------------------------

    def ask(self, actor: Actor, mute: bool) -> None:
        # An identity that waits for itself elsewhere gets the lock there first, and only then finds it its own.
        only_if(self.model.holder is not None or not self.waits(actor.token, actor.ticket))
        words = (actor.token, actor.ttl_ms, actor.ticket, SLOW_MS if actor.kind == "polling" else 0)
        reusable = actor.kind == "identity"
        self.asking, self.own = actor, (actor.ticket,)
        most = most_waiting(actor.number)
        former = self.came.get(actor.ticket)
        ahead = AHEAD[actor.number % len(AHEAD)]
        least = None if ahead is None else self.now + ahead
        more = [*(b"" if one is None else one for one in (most, former)), b"" if least is None else b"%016d" % least]
        while more and more[-1] == b"":
            del more[-1]
        asked = (*words, int(reusable), *more)
        decide = lambda it: rules.acquire(it, *words, reusable, most, former, least)  # noqa: E731
        with self.kept_in(KEYS.queue, *([KEYS.polls] if words[3] else [])) as queued:
            queued(actor.ticket, self.both(decide, "lock/acquire", *asked, mute=mute))
        self.asking, self.own = None, ()

    def request(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        inbox = data.draw(st.sampled_from(INBOXES))
        ttl_ms = data.draw(st.sampled_from([SLOW_MS, 600_000, 7_200_000, FOREVER]))
        actor = Actor(len(self.actors) + 1, kind, inbox, ttl_ms)
        self.actors.append(actor)
        self.ask(actor, data.draw(MUTE))

    def waits(self, token: bytes, but: bytes = b"") -> bool:
        """Return whether a token waits, with another ticket than ``but``."""
        others = [Ticket.parse(member) for member in self.model.queue if member != but]
        return any(other is not None and other.token == token for other in others)

    def someone(self, data: st.DataObject) -> Actor:
        """Likely one who holds or waits."""
        found = [a for a in self.actors if a.token == self.model.holder or a.ticket in self.model.queue]
        return likely(data, found, self.actors)

    def look_again(self, data: st.DataObject) -> None:
        actor = self.someone(data)
        # A copy of a request that is long over (its token forgotten as the last one) would be a new request.
        only_if(actor.ticket in self.model.queue or actor.token in (self.model.holder, self.model.granted))
        self.ask(actor, data.draw(MUTE))

    def release(self, data: st.DataObject) -> None:
        """Also the undoing of a cancelled request."""
        actor = self.someone(data)
        # An identity that also waits for itself elsewhere cannot be told from that other one: see lock/release.lua.
        only_if(not self.waits(actor.token, actor.ticket))
        pending = actor.kind != "identity" and data.draw(st.booleans())
        self.own = (actor.ticket,)
        words, mute = (actor.token, actor.ticket), data.draw(MUTE)
        gap_ms = data.draw(st.sampled_from([0, 150]))
        rule_ = lambda it: rules.release(it, *words, pending, gap_ms)  # noqa: E731
        self.both(rule_, "lock/release", *words, int(pending), gap_ms, mute=mute, spends=pending)
        self.own = ()

    def ends(self) -> list[int]:
        busy = [self.model.polls[POLLERS_TICKET] * 1000 + BUSY_MS * 1000] if POLLERS_TICKET in self.model.polls else []
        return super().ends() + busy

    def been_busy(self, data: st.DataObject) -> None:
        """As if it had been handed over for so long: about as long as until it is left free once."""
        only_if(POLLERS_TICKET not in self.model.queue)
        since = self.now // 1000 - BUSY_MS + data.draw(st.sampled_from([0, 0, 1]))
        self.client.zadd(KEYS.polls, {POLLERS_TICKET: since})
        self.client.pexpire(KEYS.polls, 600_000)
        self.model = replace(self.model, polls={**self.model.polls, POLLERS_TICKET: since})

    def withdraw(self, data: st.DataObject) -> None:
        """Take back a ticket alone."""
        only_if(self.model.queue)
        member = data.draw(st.sampled_from(self.model.queue))
        self.own = (member,)
        self.both(lambda it: rules.release(it, b"", member, False), "lock/release", b"", member, 0)
        self.own = ()

    def renew(self, data: st.DataObject) -> None:
        ttl_ms = data.draw(st.sampled_from([SLOW_MS, 600_000, 7_200_000]))
        actor = self.someone(data)
        token, mute = actor.token, data.draw(MUTE)
        only_if(self.model.holder is not None or not self.waits(token))
        if actor.kind != "sharing":
            self.both(lambda it: rules.renew(it, token, ttl_ms), "lock/renew", token, ttl_ms, mute=mute)
            return
        fences = data.draw(st.sampled_from([0, 5, 4096]))
        words, last = (token, ttl_ms, fences), self.fence
        renewed = self.both(lambda it: rules.renew(it, *words), "lock/renew", *words, mute=mute, spends=fences > 0)
        assert isinstance(renewed.reply, tuple)
        if fences and renewed.reply[0] == Renewed.RENEWED:
            assert renewed.reply[2] > last, "P8"

    def force(self, data: st.DataObject) -> None:
        """Not twice: the second run would hit the next holder."""
        before = replace(self.model, now=self.now)
        self.check_promises(before, self.once(rules.force, "lock/force_release", (), data.draw(MUTE)))

    def take_both(self, data: st.DataObject) -> None:
        """This lock together with another one, which is free or not."""
        taken = data.draw(st.booleans())
        if taken:
            self.client.set(OTHER.name, "somebody", px=SLOW_MS)
        number = len(self.actors) + 1
        prefix, ends = b"t", b"%d %d" % (number, number + 1)
        self.actors += [Actor(number, "impatient", b"", SLOW_MS), Actor(number + 1, "impatient", b"", SLOW_MS)]
        tokens = (prefix + b"%d" % number, prefix + b"%d" % (number + 1))
        other = LockSnapshot(self.now, b"somebody" if taken else None, SLOW_MS if taken else FREE_MS)
        before = replace(self.model, now=self.now)
        first, second = rules.acquire_all((before, other), SLOW_MS, tokens)
        replies = type(self).execute(self.client, "lock/acquire_all", BOTH, (SLOW_MS, prefix, ends), self.now)
        self.compare(replies[0], first)
        assert isinstance(replies[1], int) is isinstance(replies[0], int) is isinstance(second.reply, int)
        assert self.client.get(OTHER.name) == (b"somebody" if taken else second.after.holder)
        self.client.delete(*OTHER.all)
        self.asking = self.actors[-2]
        self.check_promises(before, first)
        self.asking = None

    def end(self, data: st.DataObject) -> None:
        """The lease ends."""
        only_if(self.model.holder)
        self.client.delete(KEYS.name)
        self.model = replace(self.model, holder=None, left=FREE_MS)

    def evict(self, data: st.DataObject) -> None:
        lost: dict[bytes, dict[str, Any]] = {
            KEYS.name: {"holder": None, "left": FREE_MS},
            KEYS.fence: {"fence": 0, "granted": b"", "kept": FREE_MS},
            KEYS.queue: {"queue": ()},
            KEYS.polls: {"polls": {}},
        }
        self.lose(data, lost)


class Attaching(History):
    """Leases also change hands."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "attach": 8}

    def attach(self, data: st.DataObject) -> None:
        """To a new token; also when its own lease is over, or never was."""
        former = self.someone(data)
        only_if(former.kind not in ("sharing", "identity") and not self.waits(former.token))
        new = Actor(len(self.actors) + 1, "impatient", b"", data.draw(st.sampled_from([SLOW_MS, 600_000, FOREVER])))
        self.actors.append(new)
        words, held = (new.token, new.ttl_ms, former.token), self.model.holder
        known = self.model.fence if self.model.granted == held else 0
        found = self.both(lambda it: attach_lock(it, *words), "lock/attach", *words, mute=data.draw(MUTE))
        if held == former.token:
            assert self.model.holder == new.token
            assert isinstance(found.reply, tuple)
            assert not known or found.reply[1] == known, "the fence stays"


class Watched(History):
    """The same with WATCH, MULTI and EXEC. The queue is looked at two by two."""

    execute = staticmethod(by_watch)
    watching = True


class Later(History):
    """Among tickets of a later layout."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "come_later": 3}


class LaterByWatch(Watched):
    """The same with WATCH, MULTI and EXEC."""

    commands = Later.commands


def _near(found: int, expected: int) -> int:
    return expected if found >= 0 and -SLOW_MS / 2 < found - expected <= 0 else found


@pytest.fixture(scope="module", autouse=True)
def _private() -> Iterator[None]:
    with private_server():
        yield


@pytest.mark.parametrize("machine", [History, Watched, Attaching, Later, LaterByWatch])
def test_random_histories_agree_with_the_rules(machine: type[History], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_lock, "WINDOW", 2)
    run_state_machine_as_test(machine, settings=settings(PROFILE, max_examples=64 // SHARE))


BUGS: dict[str, Callable[[LockSnapshot], LockSnapshot]] = {
    "last come, first served": lambda model: replace(model, queue=model.queue[::-1]),
    "the holder is forgotten": lambda model: replace(model, holder=None),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_comparison_notices_a_difference(bug: Callable[[LockSnapshot], LockSnapshot]) -> None:
    """A model that goes wrong when two wait must be found out."""

    class Wrong(History):
        def request(self, data: st.DataObject) -> None:
            if len(self.model.queue) >= 2:
                self.model = bug(self.model)
            super().request(data)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=PROFILE)
