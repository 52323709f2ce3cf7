"""Random histories of permits, run on a server by the scripts or with WATCH, and by `permit_rules.py`; compared.

Time is ours: in the scripts the server's TIME is replaced by the last two arguments, so every expiry is exact. Each
command runs twice (P4). Compared are the reply, the messages that arrive, and all that is stored. Besides the model
there are the promises, in plain words and without the model's help: P1, P2, P8, and that every key has a ttl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from redis_sync_aio._engine import permit_rules as rules
from redis_sync_aio._engine import watch_permits
from redis_sync_aio._engine.permit_rules import PermitDecision
from redis_sync_aio._scripts.constants import Outcome

from ..support.executions import by_watch, clocked
from ..support.histories import (
    INBOXES,
    KINDS,
    MUTE,
    NOBODY,
    PROFILE,
    SECOND,
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
    FENCE_RANGE,
    HOUR_MS,
    PAUSED_LIMIT,
    WRITER_WEIGHT,
    Message,
    Permit,
    PermitSnapshot,
    Renewed,
    Script,
    Sharer,
    Ticket,
    load,
    permit_keys,
    ticket_member,
)
from ..support.script_mutants import Mutant
from . import barrier_rules as barriers
from . import gate_rules as gates
from .attach_rules import attach, downgrade

KEYS = permit_keys(b"h", "sem")
PERMITS, STATE, QUEUE, POLLS = KEYS.all
SCRIPTS = tuple(f"permits/{name}" for name in ("acquire", "release", "renew", "resize", "attach", "count_down"))
BARRIERS = ("barrier/join", "barrier/break")

SLOW_MS = 30_000
"""A test is over before so much of a real ttl has passed."""

Rule = Callable[[PermitSnapshot], PermitDecision]

COMMANDS: Mapping[str, int] = {
    "request": 12,
    "look_again": 4,
    "release": 6,
    "withdraw": 1,
    "renew": 2,
    "resize": 1,
    "let_time_pass": 3,
    "die_or_come_back": 2,
    "evict": 1,
}


@dataclass(frozen=True)
class Actor:
    """One request: its token, its ticket, and what it asks for."""

    number: int
    kind: Kind
    weight: int
    limit: int
    inbox: bytes
    ttl_ms: int
    whose: bytes = b""

    @property
    def token(self) -> bytes:
        number = self.number
        if self.kind == "sharing":
            return b"host:%b:%d~" % (self.inbox[4:], number)
        if self.kind in ("pushed", "dead"):  # as a process makes it
            return b"host:%b:%d" % (self.listens[4:], number)
        return b"me|\x00\r\n\xff" if self.kind == "identity" else odd_token(number)

    @property
    def listens(self) -> bytes:
        """Where it waits for a push."""
        return {"dead": NOBODY, "polling": b""}.get(self.kind, self.inbox)

    @property
    def ticket(self) -> bytes:
        if self.kind == "impatient":
            return b""
        return ticket_member(self.listens, self.number, self.ttl_ms, self.token, self.weight)

    @property
    def poll_ms(self) -> int:
        return self.ttl_ms if self.kind == "polling" else 0


class History(Compared[PermitSnapshot]):
    """Commands of a semaphore, by scripts."""

    commands = COMMANDS
    line = QUEUE, POLLS
    scripts: ClassVar[dict[str, str]]
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    weights: ClassVar[tuple[int, ...]] = (1, 1, 1, 2, 3, 5)
    limits: ClassVar[tuple[int, ...]] = (3, 4, 5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.model = PermitSnapshot(START, deaf=frozenset({NOBODY}))
        self.actors: list[Actor] = []
        self.kept = 0  # until when it is, in ms
        self.remembered = 0  # the last fence that the server knew
        self.granted_now: Mapping[bytes, Permit] = {}

    # -- both, and compare -------------------------------------------------------------------------------

    def stored(self) -> PermitSnapshot:
        """Read what is on the server; without tombstones that are over, which nobody has to look for."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(STATE).zrange(PERMITS, 0, -1, withscores=True)
        pipe.zrange(QUEUE, 0, -1, withscores=True).zrange(POLLS, 0, -1, withscores=True)
        for key in KEYS.all:
            pipe.pttl(key)
        state, until, queue, polls, *ttls = pipe.execute()
        assert -1 not in ttls, "a key without a ttl"
        self.check_kept(int(state.pop(b"kept", 0)), until, *ttls[:2])
        permits: dict[bytes, Permit] = {}
        for token, score in until:
            weight, fence, *previous = map(int, state.pop(b"=" + token).split())
            if weight or score > self.now:
                permits[token] = Permit(weight, fence, ceil(score), *previous)  # a tombstone ends half earlier
        known: dict[str, Any] = {name: int(state.pop(name.encode(), 0)) for name in ("limit", "used", "fence")}
        for name in ("shared", "resized"):
            known[name] = state.pop(name.encode(), b"") == b"1"
        assert state.pop(b"whole", b"3") == b"3"  # of gates; the rules have one count
        assert not state, "fields without a permit"
        alive = {ticket: int(score) for ticket, score in polls}
        waiting = tuple(ticket for ticket, _ in queue)
        places = {ticket: int(place) for ticket, place in queue}
        return replace(
            self.model,
            now=self.now,
            permits=permits,
            queue=waiting,
            places=places,
            polls=alive,
            **known,
        )

    def check_kept(self, kept: int, until: list[tuple[bytes, float]], permits: int, state: int) -> None:
        """What is known lasts until ``kept``, in ms: for longer than each permit, and for an hour after a grant."""
        left = kept - self.now // 1000
        assert not until or permits > left - SLOW_MS
        if state > 0:
            assert state > min(left, HOUR_MS) - SLOW_MS
            assert all(score < (kept + 1) * 1000 for _, score in until), "a permit outlives what is known of it"
        if kept == self.kept:
            return
        self.kept = kept
        if kept:
            assert abs(state - left) < SLOW_MS
            assert left > HOUR_MS

    def run(self, client: Any, script: str, arguments: tuple[bytes | int, ...]) -> Any:
        return client.evalsha(self.scripts[script], 4, *KEYS.all, *arguments, *divmod(self.now, SECOND))

    def once(self, decide: Rule, script: str, arguments: tuple[bytes | int, ...], mute: bool) -> PermitDecision:
        decision = self.expected(decide, mute)
        reply = self.run(self.muted if mute else self.client, script, arguments)
        assert (tuple(reply) if isinstance(reply, list) else reply) == decision.reply, (script, arguments)
        for expected in self.heard(decision):
            found = self.message()
            assert Message(found["channel"], found["data"]) == expected
        self.model = replace(decision.after, mute=False)
        stored = self.stored()
        assert stored == self.model, (script, arguments)
        self.model = stored  # with the places of tickets
        return decision

    def both(
        self, decide: Rule, script: str, *arguments: bytes | int, mute: bool = False, spends: bool = False
    ) -> PermitDecision:
        """Run it on both, and again; the second run is to grant nothing, and to change nothing; it may spend fences."""
        before = replace(self.model, now=self.now)
        first = self.once(decide, script, arguments, mute)
        self.check_promises(before, first, mute)
        again = self.once(decide, script, arguments, mute)
        same = replace(again.after, mute=first.after.mute)
        assert (replace(same, fence=first.after.fence) if spends else same) == first.after, (
            f"P4: {script} {arguments} run again changed something"
        )
        assert all(int(message.payload.split()[1]) <= 0 for message in again.messages), "P4: granted twice"
        return first

    def check_promises(self, before: PermitSnapshot, decision: PermitDecision, mute: bool) -> None:
        after, reply = decision.after, decision.reply
        live = {token: permit for token, permit in after.permits.items() if permit.until > self.now}
        assert live == after.permits, "what is over is gone"
        weights = sum(permit.weight for permit in live.values())
        held = {token: permit for token, permit in before.permits.items() if permit.until > self.now}
        assert weights == after.used <= max(after.limit, sum(permit.weight for permit in held.values())), "P1"
        self.remembered, self.granted_now = before.fence, after.permits
        granted: list[Ticket] = []
        places: list[int] = []
        fences: list[tuple[int, Ticket | Actor]] = []
        for _, payload in decision.messages:
            number, fence, *_ = map(int, payload.split())
            if fence > 0:
                (member,) = [m for m in before.queue if m.split(b"|")[1] == b"%d" % number]
                ticket = Ticket.parse(member)
                assert ticket is not None
                granted.append(ticket)
                places.append(before.queue.index(member))
                fences.append((fence, ticket))
        assert places == sorted(places), "P2: grants in the order of arrival"
        for member in before.queue[: places[-1] if places else 0]:
            ticket = Ticket.parse(member)
            assert ticket is not None
            if self.can_take(before, member, ticket) and ticket not in granted and member not in self.own:
                has_it = ticket.token in after.permits  # an identity: it is told to ask
                assert has_it or ticket.weight > after.limit, "P2: somebody living was passed over"
        if isinstance(reply, tuple) and reply[0] == Outcome.GRANTED:
            reply = reply[1]  # of a writer, whose previous fence stands next to it
        if isinstance(reply, int) and reply > 0 and self.asking:
            assert self.asking.ticket or not after.queue, "P2: a request that does not queue barged"
            fences.append((reply, self.asking))
        for fence, to in sorted(fences, key=lambda pair: pair[0]):  # the request itself may stand between others
            self.check_fence(held, to, fence)
        head = Ticket.parse(after.queue[0]) if after.queue else None
        if head is not None and not head.later and head.inbox in set(INBOXES) - after.deaf and after.limit and not mute:
            assert after.used + head.weight > after.limit, "P3: the first fits and was not granted"

    def check_fence(self, held: dict[bytes, Permit], to: Ticket | Actor, fence: int) -> None:
        """P8. ``held`` is what is held when it is granted."""
        own = held.get(to.token)
        if own is not None and own.weight >= to.weight:
            assert fence == own.fence, "the same permit, the same fence"
        elif WRITER_WEIGHT in self.limits and to.weight == 1 and self.remembered:
            assert fence == self.remembered, "readers have the fence of the last writer"
        else:
            assert fence > self.fence
            if to.weight == WRITER_WEIGHT:
                given = self.granted_now.get(to.token)
                assert given is None or given.previous == self.remembered, "the fence of the last writer"
            reads = WRITER_WEIGHT in self.limits and to.weight == 1
            last = fence + FENCE_RANGE - 1 if Sharer.of(to.token) and not reads else fence
            self.fence = self.remembered = last
            held[to.token] = Permit(to.weight, fence, 0)

    asking: Actor | None = None
    own: tuple[bytes, ...] = ()
    """Tickets that the command itself may take out of the queue."""

    # -- the commands ------------------------------------------------------------------------------------

    def ask(self, actor: Actor, mute: bool = False) -> None:
        arguments = (actor.token, actor.ttl_ms, actor.ticket, actor.poll_ms)
        size, most = (actor.weight, actor.limit, actor.whose), most_waiting(actor.number)
        former = self.came.get(actor.ticket)
        again = () if former is None else (b"" if most is None else most, former)
        asked = (*arguments, *size, *(again or (() if most is None else (most,))))
        self.asking, self.own = actor, (actor.ticket,)
        decide = lambda it: rules.acquire(it, *arguments, *size, most, former)  # noqa: E731
        with self.kept_in(QUEUE, *([POLLS] if actor.poll_ms else [])) as queued:
            queued(actor.ticket, self.both(decide, "permits/acquire", *asked, mute=mute))
        self.asking, self.own = None, ()

    def request(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        limit = data.draw(st.sampled_from([self.model.limit] * 6 + [0] * 6 + [*self.limits]))
        if not self.model.limit:
            limit = data.draw(st.sampled_from([0, *self.limits * 3]))
        weight = data.draw(st.sampled_from(self.weights))
        inbox = data.draw(st.sampled_from(INBOXES))
        ttl_ms = data.draw(st.sampled_from([10, 500, 30_000, 30_000, 7_200_000]))
        whose = data.draw(st.sampled_from([b"", b"", b"", b"keep", b"set"]))
        actor = Actor(len(self.actors) + 1, kind, weight, limit, inbox, ttl_ms, whose)
        self.actors.append(actor)
        self.ask(actor, data.draw(MUTE))

    def someone(self, data: st.DataObject) -> Actor:
        """Likely one who holds or waits."""
        found = [a for a in self.actors if a.token in self.model.permits or a.ticket in self.model.queue]
        return likely(data, found, self.actors)

    def look_again(self, data: st.DataObject) -> None:
        self.ask(self.someone(data), data.draw(MUTE))

    def release(self, data: st.DataObject) -> None:
        """Also the undoing of a cancelled request, which leaves a tombstone unless it was an identity's."""
        actor = self.someone(data)
        # An identity that also waits for itself elsewhere cannot be told from that other one.
        others = [Ticket.parse(member) for member in self.model.queue if member != actor.ticket]
        only_if(not any(other and other.token == actor.token for other in others))
        pending = int(actor.kind != "identity" and data.draw(st.booleans()))
        self.own = (actor.ticket,)
        words, mute = (actor.token, actor.ticket), data.draw(MUTE)
        self.both(lambda it: rules.release(it, *words, pending > 0), "permits/release", *words, pending, mute=mute)
        self.own = ()

    def withdraw(self, data: st.DataObject) -> None:
        """Take back a ticket alone."""
        only_if(self.model.queue)
        member = data.draw(st.sampled_from(self.model.queue))
        self.own = (member,)
        self.both(lambda it: rules.release(it, b"", member, False), "permits/release", b"", member, 0)
        self.own = ()

    def renew(self, data: st.DataObject) -> None:
        ttl_ms = data.draw(st.sampled_from([10, 1000, 60_000]))
        actor = self.someone(data)
        token, mute = actor.token, data.draw(MUTE)
        if actor.kind != "sharing":
            least = (token, ttl_ms, data.draw(st.sampled_from([1, 1, actor.weight])))
            self.both(lambda it: rules.renew(it, *least), "permits/renew", *least, mute=mute)
            return
        fences = data.draw(st.sampled_from([0, 5, 4096]))
        words, last = (token, ttl_ms, 1, fences), self.fence
        renewed = self.both(lambda it: rules.renew(it, *words), "permits/renew", *words, mute=mute, spends=fences > 0)
        assert isinstance(renewed.reply, tuple)
        if renewed.reply[0] == Renewed.RENEWED:
            reads = WRITER_WEIGHT in self.limits and self.model.permits[token].weight == 1
            assert renewed.reply[2] > last if fences and not reads else renewed.reply[2] == 0, "P8"
        self.fence = max(self.fence, self.model.fence)

    def resize(self, data: st.DataObject) -> None:
        limit = data.draw(st.sampled_from(self.limits))
        self.both(lambda it: rules.resize(it, limit), "permits/resize", limit)

    def ends(self) -> list[int]:
        return [*super().ends(), *(permit.until for permit in self.model.permits.values())]

    def evict(self, data: st.DataObject) -> None:
        """A key is lost, and what is known of the permits is lost with either of the two that tell of them."""
        lost: dict[bytes, dict[str, Any]] = {
            PERMITS: {"permits": {}, "used": 0, "shared": False},
            STATE: {"permits": {}, "used": 0, "limit": 0, "fence": 0, "shared": False, "resized": False},
            QUEUE: {"queue": ()},
            POLLS: {"polls": {}},
        }
        if not self.model.used:
            del lost[PERMITS]
        self.lose(data, lost)


class Crowded(History):
    """Few permits, and nearly all wait for them in the usual way: for these the scripts have short ways."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "release": 9, "let_time_pass": 1, "evict": 0}
    kinds = ("pushed",) * 12 + ("dead", "identity")
    weights = (1, 1, 1, 2)
    limits = (1, 2, 3)

    def release(self, data: st.DataObject) -> None:
        """Mostly of a lease, which says nothing of a ticket."""
        held = [actor for actor in self.actors if actor.token in self.model.permits]
        if not held or data.draw(st.sampled_from([True, False, False, False])):
            super().release(data)
            return
        token, mute = data.draw(st.sampled_from(held)).token, data.draw(MUTE)
        self.both(lambda it: rules.release(it, token, b"", False), "permits/release", token, b"", 0, mute=mute)


class Later(History):
    """Among tickets of a later layout."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "come_later": 3}


class Paused(History):
    """Permits of which at times none is granted, whatever is free."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "resize": 4}
    limits = (2, 4, PAUSED_LIMIT, PAUSED_LIMIT)


class PausedByWatch(Paused):
    """The same with WATCH, MULTI and EXEC."""

    watching = True

    def run(self, client: Any, script: str, arguments: tuple[bytes | int, ...]) -> Any:
        return by_watch(client, script, KEYS, arguments, self.now)


class ReadersAndWriters(History):
    """The same with the limit of a read/write lock, and writers that become readers."""

    weights = (1, 1, 1, WRITER_WEIGHT)
    limits = (WRITER_WEIGHT,)

    def resize(self, data: st.DataObject) -> None:
        """In its place: there is but one limit."""
        self.downgrade(data)

    def downgrade(self, data: st.DataObject) -> None:
        """Of a writer, of a reader, or of a token that holds nothing."""
        token, mute = self.someone(data).token, data.draw(MUTE)
        self.both(lambda it: downgrade(it, token), "permits/downgrade", token, mute=mute)

    def renew(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([super().renew, self.downgrade]))(data)


class Attaching(History):
    """Permits also change hands."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "attach": 8}

    def attach(self, data: st.DataObject) -> None:
        """To a new token; also when its own permit is over, or never was."""
        former = self.someone(data)
        only_if(former.kind not in ("sharing", "identity") and former.ticket not in self.model.queue)
        ttl_ms = data.draw(st.sampled_from([10, 1000, 60_000]))
        new = Actor(len(self.actors) + 1, "impatient", former.weight, former.limit, b"", ttl_ms)
        self.actors.append(new)
        words = (new.token, ttl_ms, former.token)
        had = self.model.permits.get(former.token)
        self.both(lambda it: attach(it, *words), "permits/attach", *words, mute=data.draw(MUTE))
        if had is not None and had.weight and had.until > self.now:
            assert self.model.permits[new.token] == Permit(had.weight, had.fence, self.now + ttl_ms * 1000)


class Gates(History):
    """Permits whose limit says that nobody gets in, or everybody."""

    weights = (1,)
    limits = (-1, -3)

    def resize(self, data: st.DataObject) -> None:
        """In its place: count it down, or close it; also twice for the same token."""
        words = (b"c%d" % data.draw(st.integers(1, 9)), data.draw(st.sampled_from([0, 1, 1, 2, 7])), 3)
        times = (data.draw(st.sampled_from([10, 60_000])), data.draw(st.sampled_from([60_000, 7_200_000])))
        self.both(lambda it: gates.count_down(it, *words, *times), "permits/count_down", *words, *times)


class Barriers(History):
    """Parties that wait for each other: some live, some die, some come again."""

    commands: ClassVar[Mapping[str, int]] = {**COMMANDS, "look_again": 8, "renew": 0}
    kinds = ("pushed", "pushed", "polling", "dead", "impatient")
    weights = (1,)
    limits = (-3, -3, -3, -3, -2)

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[int] = set()

    def ask(self, actor: Actor, mute: bool = False) -> None:
        """Join, or ask again."""
        new, parties = actor.number not in self.joined, abs(actor.limit) or 3
        self.joined.add(actor.number)
        words = (actor.token, 60_000, actor.ticket, actor.poll_ms)
        ends: tuple[int, ...] = (1,) if new else ()
        rule: Rule = lambda it: barriers.join(it, *words, parties, actor.ttl_ms, new)  # noqa: E731
        self.asks_from = frozenset({actor.listens} if actor.listens else ())
        with self.kept_in(QUEUE, POLLS) as queued:
            queued(b"", self.both(rule, "barrier/join", *words, 1, -parties, actor.ttl_ms, *ends, mute=mute))
        self.asks_from = frozenset()

    def resize(self, data: st.DataObject) -> None:
        """In its place: break it, or reset it; also twice for the same token."""
        words = (b"c%d" % data.draw(st.integers(1, 9)), 3, data.draw(st.sampled_from([0, 0, 1])), 60_000)
        rule: Rule = lambda it: barriers.break_(it, words[0], words[1], words[2] > 0, words[3])  # noqa: E731
        self.both(rule, "barrier/break", *words)

    def check_promises(self, before: PermitSnapshot, decision: PermitDecision, mute: bool) -> None:
        after, reply = decision.after, decision.reply
        let_in = {token: it for token, it in after.permits.items() if it.weight and token not in before.permits}
        assert sum(it.weight for it in after.permits.values()) == after.used
        assert not (after.queue and after.limit > 0), "nobody waits at a broken barrier"
        if let_in:
            parties = -after.limit
            assert sorted(it.fence % parties for it in let_in.values()) == list(range(parties)), "all, or none"
            assert isinstance(reply, int)
            assert not after.queue
            inboxes = {member.split(b"|")[0] for member in before.queue if self.lives(before, member)} | self.asks_from
            silent = [one for one in before.queue if not self.lives(before, one) and one.split(b"|")[0] not in inboxes]
            assert not silent, "a party that had died was counted"
            self.fence = max(it.fence for it in let_in.values())

    asks_from: frozenset[bytes] = frozenset()
    """The inbox that asks: all its parties live."""

    def lives(self, snapshot: PermitSnapshot, member: bytes) -> bool:
        return snapshot.polls.get(member, 0) * 1000 > self.now


class ByWatch(History):
    """The same with WATCH, MULTI and EXEC. The queue is looked at two by two, and what is over goes one at a time."""

    watching = True

    def run(self, client: Any, script: str, arguments: tuple[bytes | int, ...]) -> Any:
        return by_watch(client, script, KEYS, arguments, self.now)


class LaterByWatch(ByWatch):
    """The same among tickets of a later layout."""

    commands = Later.commands


@pytest.fixture(scope="module", autouse=True)
def _private() -> Iterator[None]:
    with private_server() as client:
        History.scripts = loaded(client, load)
        yield


def loaded(client: Any, load: Callable[[str], Script]) -> dict[str, str]:
    """Load the scripts for histories, and return their digests by their names."""
    return {name: client.script_load(clocked(load(name))) for name in (*SCRIPTS, "permits/downgrade", *BARRIERS)}


@pytest.mark.parametrize(
    "machine",
    [
        History,
        Crowded,
        Paused,
        PausedByWatch,
        ReadersAndWriters,
        Attaching,
        Gates,
        ByWatch,
        Barriers,
        Later,
        LaterByWatch,
    ],
)
def test_random_histories_agree_with_the_rules(machine: type[History], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_permits, "WINDOW", 2)
    monkeypatch.setattr(watch_permits, "BATCH", 1)
    run_state_machine_as_test(machine, settings=settings(PROFILE, max_examples=PROFILE.max_examples // SHARE))


BUGS = {
    "barging": ("if turn == FREE and fits(weight) then", "if fits(weight) then"),
    "a microsecond late": (
        "if soonest and tonumber(soonest) <= now then",
        "if soonest and tonumber(soonest) < now then",
    ),
    "a living poller is dropped": ("then return RESERVED, tonumber(alive) - now / 1000 end", "then end"),
    "an open gate passes over those that poll": ("if lives then hold(", "if false then hold("),
    "an open gate passes over those that are cut off": ("if limit == OPEN_LIMIT then heard = 1 end", ""),
    "a party of the barrier that has died is counted": ("if rest <= 0 then alive = false end", ""),
    "a party of the barrier is let in alone": (
        "if alive and #waiting + (present and 0 or 1) >= parties then",
        "if alive then",
    ),
    "a count that is repeated counts again": ("if permit(ARGV[1]) then\n  keep", "if false then\n  keep"),
    "a pause that is not stored": ("if state[1] ~= 'PAUSED_LIMIT' then", "if false then"),
    "a pause that gives way to no other limit": (
        "if limit == PAUSED_LIMIT then\n    first",
        "if false then\n    first",
    ),
    "a pause that another limit replaces": ("asked > 0 or asked == PAUSED_LIMIT", "asked > 0"),
    "the short way to the end of the queue, with room": ("local full = used >= limit and", "local full ="),
    "the short way from hand to hand, with the last fence": ("'used', limit, 'fence', its_fence", "'used', limit"),
    "the short way from hand to hand, to the second": (
        "redis.call('ZREM', QUEUE, first[1])",
        "redis.call('ZREM', QUEUE, first[3] or '')",
    ),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.ci
def test_the_comparison_notices_a_bug_in_the_scripts(name: str) -> None:
    bug = BUGS[name]
    machines = {"short way": Crowded, "a pause": Paused, "barrier": Barriers, "open gate": Gates, "a count": Gates}
    machine = next((one for words, one in machines.items() if words in name), History)
    mutant = Mutant(*bug)
    assert any(map(mutant.stands_in, SCRIPTS + BARRIERS)), "the scripts changed: adapt the mutant"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "scripts", loaded(History.client, mutant.load))
        with pytest.raises(AssertionError):
            run_state_machine_as_test(machine, settings=PROFILE)
