"""One name: what is asked about it, in two rounds, and what the replies mean.

The first round is for every name that a search finds, so it is short; it counts and lists. The second one is only for
names that are held or waited for; it adds details of what the first one has listed. `look` reads each round at one
moment. `inspect` sends plain commands, whose replies are of moments that follow each other closely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from .._client.cluster import Cluster, Topology
from .._client.replies import Replies, Reply, ReplyError, Words, error_code, refusal, with_own_errors
from .._core.display import not_a_lock, release_command, text
from .._core.keys import (
    BEGINNING,
    Keys,
    Kind,
    LockKeys,
    Maker,
    PermitKeys,
    SlotState,
    is_done,
    is_forgotten,
    label_of,
    mark_key,
    record_key,
    said_by,
)
from .._engine.snapshot import Ticket
from .._engine.watch_dialogue import microseconds, not_ours, pairs
from .._engine.watch_permits import permits_of, state_alone
from .._scripts.constants import FREE_MS, PAUSED_LIMIT, POLLERS_TICKET, WRITER_WEIGHT, stated_limit
from .._transport.call import not_understood
from ..errors import SyncError
from ..errors._base import page
from .views import Access, HolderView, MarkView, NameView, Problem, ProblemCode, WaiterView

TOMBSTONES = 16
"""Number of permits that are read beyond those shown."""

HOLDERS, LEFT, FENCE, STATE = "its holder", "the time left of its lease", "its fence", "its limit and fences"
QUEUE, ALIVE, MARK = "its queue", "which of its waiters are alive", "the mark of its job"
"""The facts that a server may refuse to show, in words."""

# -- Problems of a name -----------------------------------------------------------------------------------------


CLOCK = 1_000_000
"""Microseconds by which a fence may be ahead of the server's clock: a range of fences, or many grants in a row."""

TRANSIENT: frozenset[ProblemCode] = frozenset(
    {"holder_disconnected", "queue_without_holder", "fence_lost", "permits_lost", "dead_waiters"}
)
"""Problems that may only be the moment between two reads: they are looked at twice."""


MEANINGS: Mapping[ProblemCode, str] = {
    "holder_disconnected": "process {pid} on {host} holds it without a ttl, and is not connected to the server: it has "
    "ended, is cut off, or polls since the server refused it messages (polling_instead in its log). Look there; if it "
    "has ended, release the lock by hand: {command}",
    "dead_waiters": "{number} of its waiters {verb} gone ({whose}): no process listens for the grant. There is nothing "
    "to do: the next release passes them over",
    "queue_without_holder": "requests wait although it is free: {reason}",
    "fence_lost": "its holder's token is one of this package, but the key that remembers its fence is gone or names "
    "another grant: a memory limit evicted it, or another program wrote one of the two. Later fences are still "
    "greater; set maxmemory-policy to noeviction",
    "permits_lost": "one of its two keys is gone, so no holder is known, and its holders lose their leases "
    "at the next renewal: a memory limit evicted it, or another program deleted it. Set maxmemory-policy to "
    "noeviction",
    "over_limit": "{held} permits are held, and the limit is {limit}: it was lowered by a resize. Nothing is granted "
    "until enough of them were released",
    "broken": "a party ended while it waited, or abort() was called: the barrier is broken, so all parties that come "
    "get BrokenBarrierError. Once all have got it, await AsyncBarrier(…).reset()",
    "clock_behind": "its last fence is {ahead:.1f} seconds ahead of the server's clock: that clock was set back, or "
    "the data came from a server whose clock is ahead. Fences keep rising; compare the clocks of the servers",
    "wrong_type": "another program uses {keys} for something else, so requests fail with WrongKeyType. Give the lock "
    "another name, or delete the key if its value is not needed",
    "unreadable": "the server refused to show {facts}: {answer}. Extend the rights of this user: {page}",
}
"""The meaning of each problem, and what to do; for a key without a ttl see `not_a_lock`."""
FIRST_POLLS = "the first waiter polls, and acquires it at its next look"
NOT_WOKEN = (
    "its key was deleted by another program, or it expired. The waiters look again within their poll_cap (2.5 "
    "seconds); if this persists, no waiting process is running"
)
"""Reasons for a queue without a holder."""


# -- Holders and waiters, read from tokens and tickets ----------------------------------------------------------


Listening: TypeAlias = Mapping[bytes, bool]
"""True for each channel with a listener; channels that are not known are missing."""

FIRST_TIME = 10**15
"""Microseconds; a score below it is a place in a queue, not the time when a ticket came."""


class QueuedTicket(NamedTuple):
    """A ticket in the queue, and what is known of it."""

    member: bytes
    ticket: Ticket
    since: float | None  # server time in microseconds


def _queued(members: Iterable[tuple[bytes, float]]) -> list[QueuedTicket]:
    """Return the tickets among the members of a queue, which come with their scores."""
    return [
        QueuedTicket(member, ticket, score if score >= FIRST_TIME else None)
        for member, score in members
        if member != POLLERS_TICKET and (ticket := Ticket.parse(member)) is not None
    ]


def listening_in(reply: Reply) -> dict[bytes, bool]:
    """Return for each channel in a reply to PUBSUB NUMSUB whether it has a listener; nothing if that was refused."""
    if isinstance(reply, ReplyError):
        return {}
    numbers = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {channel: int(number) > 0 for channel, number in numbers}


def _connected(maker: Maker, listening: Listening) -> bool | None:
    """Return whether the process listens to its inbox of then, or has another one now; None if nothing tells."""
    if maker.polls or maker.presence not in listening:
        return None
    return listening.get(maker.inbox, False) or listening[maker.presence]


def _owner(
    token: bytes, maker: Maker | None, foreign: bool = False
) -> tuple[str, str | None, str, str | None, int | None]:
    """Return the first fields of a view: the token, the identity, the label, the host and the pid."""
    identity = text(token) if maker is None and not foreign else None
    host, pid = (None, None) if maker is None else (maker.host, maker.pid)
    return text(token), identity, label_of(token), host, pid


def _waiter(
    one: QueuedTicket, now: int, permits: int, polls_until: Reply, listening: Listening, polls_known: bool = True
) -> WaiterView:
    """Describe a waiter, from its ticket.

    ``permits``: the limit; 0: of a lock. ``polls_until``: the score in POLLS, which ``polls_known`` says may be read.
    """
    ticket, maker = one.ticket, Maker.of(one.ticket.token)
    polls = not ticket.inbox
    if not polls:
        alive = listening.get(ticket.inbox)
    else:
        alive = polls_until is not None and float(polls_until) * 1000 > now if polls_known else None
    return WaiterView(
        *_owner(ticket.token, maker),
        waited=None if one.since is None else max(0.0, (now - one.since) / 1e6),
        weight=1 if permits == WRITER_WEIGHT else ticket.weight,
        access=access(ticket.weight, permits),
        polls=polls,
        alive=alive,
    )


def holder(
    token: bytes,
    now: int,
    fence: int | None,
    remaining: float | None,
    *,
    listening: Listening,
    foreign: bool = False,
    weight: int = 1,
    permits: int = 0,
) -> HolderView:
    """Describe a holder. ``remaining``: seconds; ``permits``: the limit; 0: of a lock."""
    maker = Maker.of(token)
    side = access(weight, permits)
    held_for = None if fence is None or side == "read" else max(0.0, (now - fence) / 1e6)
    return HolderView(
        *_owner(token, maker, foreign),
        held_for=held_for,
        remaining=remaining,
        fence=fence,
        weight=1 if side else weight,
        access=side,
        foreign=foreign,
        connected=_connected(maker, listening) if maker else None,
    )


def access(weight: int, permits: int) -> Access | None:
    """Return the side of a read/write lock that such a weight is on; None if it is none, by its limit."""
    if permits != WRITER_WEIGHT:
        return None
    return "write" if weight == WRITER_WEIGHT else "read"


# -- The replies about one name ----------------------------------------------------------------------------------


class Reading(ABC):
    """The replies about one name: `first_asked`, `first`, `then_asked` and `view` follow each other."""

    kind: Kind
    moved: ReplyError | None = None
    """The reply that another shard has the name, if there was one."""
    refused: ReplyError | None = None
    """The first error among the replies, other than of optional facts."""
    stale = False
    """True if it has to be read again: it changed between the rounds, or the first one has not listed enough."""
    _queue_at = 1
    _found = False
    """True if there is a holder."""
    _fence: int | None = None
    _now = 0

    def __init__(self, keys: Keys, shown: int) -> None:
        self.name = keys.name
        self.keys = keys
        """All keys that are read."""
        self._queue, self._polls = keys.all[self._queue_at], keys.all[3]
        self.shown = shown
        self.tickets: list[QueuedTicket] = []
        self.problems: list[Problem] = []
        self._wrong: list[bytes] = []
        self._refused: dict[str, str] = {}  # what the server refused to show, and its answer
        self._queued = 0

    @abstractmethod
    def first_asked(self, now: int) -> list[Words]:
        """Return the commands of the first round. ``now``: server time in microseconds, or earlier."""

    @abstractmethod
    def first(self, replies: Replies, now: int) -> bool:
        """Take the replies of the time ``now``; return whether there is anything to tell."""

    @abstractmethod
    def then_asked(self) -> list[Words]:
        """Return the commands of the second round."""

    @abstractmethod
    def view(self, replies: Replies, address: str, listening: Listening) -> NameView:
        """Take the replies of the second round, none if it was left out, and return the view."""

    @abstractmethod
    def _tokens(self) -> set[bytes]:
        """Return the tokens of the holders."""

    @property
    def known(self) -> bool:
        """True if the server has anything of it."""
        return self._active or self._fence is not None

    @property
    def _active(self) -> bool:
        return bool(self._found or self.tickets or self.problems or self._wrong or self._refused)

    def _usable(self, reply: Reply, key: bytes, what: str, otherwise: Reply = None) -> Reply:
        """Return the reply, or ``otherwise`` in place of an error, which is noted. ``what``: the facts in it."""
        if not isinstance(reply, ReplyError):
            return reply
        code = error_code(str(reply))
        self.refused = self.refused or reply
        if code == "WRONGTYPE":
            if key not in self._wrong:
                self._wrong.append(key)
        elif code == "MOVED":
            self.moved = reply
        elif code not in ("ASK", "TRYAGAIN"):  # these two: another shard tells
            self._refused.setdefault(what, str(reply))
        return otherwise

    def _readable(self, key: bytes, *facts: str) -> bool:
        """Return whether these facts, which are in ``key``, are known. What is not readable is not missing."""
        return key not in self._wrong and not any(fact in self._refused for fact in facts)

    def _makers(self) -> list[Maker]:
        return [maker for maker in map(Maker.of, self._tokens()) if maker is not None]

    def channels(self) -> set[bytes]:
        """Return the channels of all its processes, to which they listen if they are connected."""
        found = {one.ticket.inbox for one in self.tickets if one.ticket.inbox}
        return found.union(*({it.inbox, it.presence} for it in self._makers() if not it.polls))

    def absent(self, listening: Listening) -> set[bytes]:
        """Return the presences of the processes that hold it and are not connected to this server."""
        return {maker.presence for maker in self._makers() if _connected(maker, listening) is False}

    def _add(self, code: ProblemCode, **facts: object) -> None:
        self.problems.append(Problem(code, MEANINGS[code].format(**facts)))

    def _queue_asked(self) -> list[Words]:
        return [(b"ZCARD", self._queue), (b"ZRANGE", self._queue, 0, self.shown - 1, b"WITHSCORES")]

    def _take_queue(self, number: Reply, tickets: Reply) -> None:
        found = pairs(self._usable(tickets, self._queue, QUEUE, []))
        self.tickets = _queued(found)
        self._queued = self._usable(number, self._queue, QUEUE, 0) - (len(found) - len(self.tickets))

    def _polled(self) -> list[QueuedTicket]:
        return [one for one in self.tickets if not one.ticket.inbox]

    def _about_queue(self) -> list[Words]:
        return [(b"ZSCORE", self._polls, one.member) for one in self._polled()]

    def _waiters(
        self, replies: Replies, permits: int, listening: Listening, holders: set[bytes]
    ) -> tuple[list[WaiterView], int]:
        """Return the waiters, and how many there are. ``holders`` were granted something between two commands."""
        scores = [self._usable(reply, self._polls, ALIVE) for reply in replies]
        until = dict(zip([one.member for one in self._polled()], scores, strict=False))
        polls_known = bool(replies) and self._readable(self._polls, ALIVE)
        rest = [one for one in self.tickets if one.ticket.token not in holders]
        found = [_waiter(one, self._now, permits, until.get(one.member), listening, polls_known) for one in rest]
        if dead := [it for it in found if it.alive is False]:
            whose = ", ".join(sorted({f"{it.host}:{it.pid}" if it.host else repr(it.token) for it in dead})[:5])
            self._add("dead_waiters", number=len(dead), verb="is" if len(dead) == 1 else "are", whose=whose)
        return found, max(len(found), self._queued - (len(self.tickets) - len(rest)))

    def _judge_queue(self, waiters: list[WaiterView]) -> None:
        """Note a queue without a holder, unless all its waiters are dead."""
        if any(it.alive is not False for it in waiters):
            self._add("queue_without_holder", reason=FIRST_POLLS if waiters[0].polls else NOT_WOKEN)

    def _judge_keys(self) -> None:
        if self._refused:
            *facts, last = self._refused
            answer = next(iter(self._refused.values())).rstrip(".")
            shown = f"{', '.join(facts)}{' and ' if facts else ''}{last}"
            self._add("unreadable", facts=shown, answer=answer, page=page("operations/inspection", "rights"))
        if self._wrong:
            self._add("wrong_type", keys=", ".join(map(text, self._wrong)))
        if self._fence is not None and self._fence - self._now > CLOCK:
            self._add("clock_behind", ahead=(self._fence - self._now) / 1e6)

    def _name_view(
        self,
        address: str,
        holders: Sequence[HolderView],
        waiters: Sequence[WaiterView],
        held: int,
        waiting: int,
        limit: int | None,
        known: bool,
        mark: MarkView | None = None,
    ) -> NameView:
        """Judge the keys, and return the view. ``known``: whether the holders are readable."""
        self._judge_keys()
        return NameView(
            name=text(self.name),
            kind=self.kind,
            server=address,
            holders=tuple(holders),
            waiters=tuple(waiters),
            held=held,
            waiting=waiting,
            limit=limit,
            available=max(0, limit - held) if known and limit is not None else None,
            fence=self._fence,
            problems=tuple(self.problems),
            mark=mark,
        )


class LockReading(Reading):
    """A lock, as its keys tell."""

    def __init__(self, keys: LockKeys, shown: int) -> None:
        super().__init__(keys, shown)
        self.kind: Kind = keys.kind.name
        self._fence_key = keys.fence
        self._key, self._record, self._mark = keys.all[0], record_key(keys), mark_key(keys)
        self.keys = replace(keys, all=(*keys.all[:4], self._record, self._mark), heads={})
        self._mark_left = -2
        self._holder: bytes | None = None
        self._left = -2
        self._granted = b""

    def first_asked(self, now: int) -> list[Words]:
        """See `Reading`."""
        about = [(b"GET", self._key), (b"PTTL", self._key), (b"GET", self._fence_key), (b"PTTL", self._mark)]
        return [*about, *self._queue_asked()]

    def first(self, replies: Replies, now: int) -> bool:
        """See `Reading`."""
        held, left, last, mark_left, *queue = replies
        self._now = now
        self._mark_left = -2 if isinstance(mark_left, ReplyError) else mark_left
        self._holder = self._usable(held, self._key, HOLDERS)
        self._left = self._usable(left, self._key, LEFT, -2)
        if (last := self._usable(last, self._fence_key, FENCE)) is not None:
            if last[:16].isdigit() and last[16:17] == b" ":
                self._fence, self._granted = int(last[:16]), last[17:]
            else:
                self._usable(not_ours(self._fence_key, "it has no fence"), self._fence_key, FENCE)
        self._take_queue(*queue)
        self._found = self._holder is not None
        return self._active

    def _tokens(self) -> set[bytes]:
        return set() if self._holder is None else {self._holder}

    def then_asked(self) -> list[Words]:
        """See `Reading`."""
        mark: list[Words] = [(b"GETRANGE", self._mark, 0, BEGINNING - 1)] if self._mark_left != -2 else []
        return [(b"HGET", self._record, b"fence"), *mark, *self._about_queue()]

    @property
    def known(self) -> bool:
        """See `Reading`."""
        return super().known or self._mark_left != -2

    def _mark_view(self, reply: Reply) -> MarkView | None:
        """Return the view of the mark; None if it has gone since the first round."""
        state: SlotState | None = None
        if not (isinstance(reply, ReplyError) and error_code(str(reply)) == "NOPERM"):  # an optional right
            found = self._usable(reply, self._mark, MARK)
            if found is not None and (found == b"" or is_forgotten(found)):
                return None
            said = None if found is None else said_by(found)
            if found is not None and (len(found) == BEGINNING or (said is not None and is_done(said))):
                state = "done"
            elif said is not None:
                state = "running" if self._holder is not None else "failed"
        return MarkView(state, None if self._mark_left == -1 else self._mark_left / 1000)

    def view(self, replies: Replies, address: str, listening: Listening) -> NameView:
        """See `Reading`."""
        mark = None
        if replies and isinstance(replies[0], bytes):
            self.kind = "robust"
        if self._mark_left != -2 and replies:
            mark, replies = self._mark_view(replies[1]), [replies[0], *replies[2:]]
        holders = () if self._holder is None else (self._holder_view(self._holder, listening),)
        waiters, waiting = self._waiters(replies[1:], 0, listening, self._tokens())
        if holders and self._holder is not None:
            self._judge_holder(holders[0], self._holder)
        known = self._readable(self._key, HOLDERS)
        if known and not holders:
            self._judge_queue(waiters)
        return self._name_view(address, holders, waiters, len(holders), waiting, 1, known, mark)

    def _holder_view(self, token: bytes, listening: Listening) -> HolderView:
        ours = token == self._granted != b""
        fence = self._fence if ours else None
        endless = self._left == -1 or not self._readable(self._key, LEFT)
        left = None if endless else max(0, self._left) / 1000  # -2: it has just expired
        foreign = not ours and self._readable(self._fence_key, FENCE)
        return holder(token, self._now, fence, left, foreign=foreign, listening=listening)

    def _judge_holder(self, one: HolderView, token: bytes) -> None:
        if one.foreign and one.host is not None:
            self._add("fence_lost")
        elif one.foreign and self._left == -1:
            self.problems.append(Problem("foreign_without_ttl", not_a_lock(self._key, token)))
        if self._left == -1 and one.connected is False:
            command = release_command(self._key, token)
            self._add("holder_disconnected", pid=one.pid, host=one.host, command=command)


class PermitReading(Reading):
    """A semaphore, or something else that consists of permits, as its keys tell."""

    _queue_at = 2

    def __init__(self, keys: PermitKeys, shown: int, more: int) -> None:
        super().__init__(keys, shown)
        self._most = shown + more
        self._permits, self._state = keys.all[:2]
        self.kind: Kind = keys.kind.name
        self._gate = bool(keys.kind.closed)
        self._limit = self._used = 0
        self._all_shown = True
        self._live: list[tuple[bytes, float]] = []  # the first ones, and until when

    def first_asked(self, now: int) -> list[Words]:
        """See `Reading`."""
        return [
            (b"HMGET", self._state, b"limit", b"used", b"fence"),
            (b"PTTL", self._state),
            (b"ZCARD", self._permits),
            (
                b"ZRANGEBYSCORE",
                self._permits,
                b"(%d" % now,
                b"+inf",
                b"WITHSCORES",
                b"LIMIT",
                0,
                self._most,
            ),
            *self._queue_asked(),
        ]

    def first(self, replies: Replies, now: int) -> bool:
        """See `Reading`."""
        known, left, number, permits, *queue = replies
        self._now = now
        left = FREE_MS if isinstance(known, ReplyError) else self._usable(left, self._state, STATE, FREE_MS)
        known = self._usable(known, self._state, STATE, [None] * 3)
        try:
            self._limit, self._used, fence = state_alone(self._state, known, left)
        except ReplyError as foreign:  # data of another program, in a hash
            fence = self._usable(foreign, self._state, STATE, 0)
        self._fence, used = fence or None, known[1]
        listed = pairs(self._usable(permits, self._permits, HOLDERS, []))
        live = [(token, until) for token, until in listed if until.is_integer() and until > now]
        self.stale = len(listed) == self._most and len(live) < self.shown
        self._all_shown, self._live = len(live) <= self.shown and not self.stale, live[: self.shown]
        number = self._usable(number, self._permits, HOLDERS, 0)
        permits_gone = self._used and not number and self._readable(self._permits, HOLDERS)
        if permits_gone or (live and used is None and self._readable(self._state, STATE)):
            self._add("permits_lost")
        if self.kind == "barrier" and self._limit > 0:
            self._add("broken")
        self._take_queue(*queue)
        self._found = bool(self._live)
        return self._active

    def _tokens(self) -> set[bytes]:
        return {token for token, _ in self._live}

    def then_asked(self) -> list[Words]:
        """See `Reading`."""
        fields = [b"=" + token for token, _ in self._live] or [b"="]
        return [(b"HMGET", self._state, *fields), *self._about_queue()]

    def view(self, replies: Replies, address: str, listening: Listening) -> NameView:
        """See `Reading`."""
        now, unknown, shared = self._now, [None] * len(self._live), self._limit == WRITER_WEIGHT
        only = WRITER_WEIGHT if shared and self._used >= WRITER_WEIGHT else 1
        about = self._usable(replies[0], self._state, STATE, unknown) if replies else unknown
        holders, weights = list[HolderView](), 0
        for (token, until), found in zip(self._live, about, strict=False):
            if replies and found is None and not self.problems and self._readable(self._state, STATE):
                self.stale = True
                continue  # released between the two rounds
            of_it = permits_of([token], [found], [until])
            weight, fence = (of_it[token].weight, of_it[token].fence) if of_it else (only, 0)
            weights += weight
            it = holder(
                token, now, fence or None, (until - now) / 1e6, listening=listening, weight=weight, permits=self._limit
            )
            holders.append(it)
        waiters, waiting = self._waiters(replies[1:], self._limit, listening, self._tokens())
        exact = self._all_shown and (replies or shared or not holders)
        held = weights if exact else self._used  # which also counts those that have ended unnoticed
        if held >= WRITER_WEIGHT:
            held = 1
        known = self._readable(self._permits, HOLDERS)
        if known and not (holders or self._gate or self._limit == PAUSED_LIMIT):
            self._judge_queue(waiters)
        if not (shared or self._gate) and held > self._limit > 0:
            self._add("over_limit", held=held, limit=self._limit)
        limit = None if shared or self._gate else stated_limit(self._limit)
        return self._name_view(address, holders, waiters, held, waiting, limit, known)


def reading_of(keys: Keys, shown: int, more: int = TOMBSTONES) -> Reading:
    """Return the reader of one name, with the first ``shown`` holders and waiters.

    ``more``: how many permits to read beyond those shown. Undone requests may be among them.
    """
    if isinstance(keys, PermitKeys):
        return PermitReading(keys, shown, more)
    assert isinstance(keys, LockKeys)
    return LockReading(keys, shown)


# -- One name, read by a coordinator: behind all that it has sent about the name, and each round at one moment --


Read: TypeAlias = Callable[..., Awaitable[Replies]]
"""Runs commands on keys at one moment, as `Hub.read`."""

ATTEMPTS = 3
"""Number of attempts at a name that changes between the two rounds. After that, what went meanwhile is left out."""
MANY = 10_000
"""Number of permits that are read beyond those shown where many requests were undone."""


async def look(read: Read, servers: Topology, keys: Keys, shown: int, *, whole: bool) -> NameView:
    """Return the view of a name; raise CommandRefused if the server refuses to show a part of it.

    ``whole``: in two round trips; else in one, without the weights and fences of permits, connections and marks.
    """
    now, more, attempts = 0, TOMBSTONES, 0
    try:
        while True:
            attempts += 1
            reading = reading_of(keys, shown, more)
            replies = await read(reading.keys, *reading.first_asked(now))
            now = microseconds(replies[0])
            reading.first(replies[1:], now)
            if reading.stale and more < MANY:
                more = MANY
                continue
            view = await _details(read, servers, reading, whole)
            if not reading.stale or attempts >= ATTEMPTS:
                break
    except SyncError:
        raise
    except (ValueError, TypeError) as error:
        raise not_understood(keys.name, error) from error
    if reading.refused is not None:
        raise refusal(keys.name, str(reading.refused), keys=keys.all)
    return view


async def _details(read: Read, servers: Topology, reading: Reading, whole: bool) -> NameView:
    listening: Listening = {}
    replies: Replies = []
    if whole and reading.known:
        channels = sorted(reading.channels())
        _, *replies, heard = await read(reading.keys, *reading.then_asked(), (b"PUBSUB", b"NUMSUB", *channels))
        listening = listening_in(heard)
        if isinstance(servers, Cluster):  # a process that is not connected to this shard may be connected to another
            absent = reading.absent(listening)
            listening = {channel: here for channel, here in listening.items() if channel not in absent}
    return reading.view(replies, servers.address_at(reading.keys.all[0]), listening)


def brief_view(reading: Reading, reply: Reply) -> NameView | None:
    """Return the view of a name by the reply to its first round alone; None: the server refused a part of it."""
    time, *replies = with_own_errors(reply)
    reading.first(replies, microseconds(time))
    return None if reading.refused is not None else reading.view([], "", {})
