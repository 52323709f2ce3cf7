"""One name: what is asked about it, in two rounds, and what the replies mean.

The first round is for every name that a search finds, so it is short; it counts and lists. The second one is only for
names that are held or waited for; it adds details of what the first one has listed. `over_link` reads each round at one
moment. `inspect` sends plain commands, whose replies are of moments that follow each other closely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol, TypeAlias

from .._client.checkout import OUT_OF_REACH, CheckedOut
from .._client.cluster import Cluster, Topology
from .._client.replies import (
    Replies,
    Reply,
    ReplyError,
    Words,
    answered,
    error_answer,
    error_code,
    pack,
    refusal,
    with_own_errors,
)
from .._client.settings import RedisClient, address_of
from .._core.display import text
from .._core.keys import (
    BEGINNING,
    KEY_ENDINGS,
    NEVER_HELD,
    Keys,
    LockKeys,
    PermitKeys,
    PermitKind,
    SlotState,
    is_done,
    is_forgotten,
    keys_around,
    mark_key,
    record_key,
    said_by,
)
from .._engine.watch_dialogue import microseconds, not_ours, pairs
from .._engine.watch_permits import permits_of, state_alone
from .._scripts.constants import FREE_MS, PAUSED_LIMIT, WRITER_WEIGHT, stated_limit
from .._transport.call import not_understood
from ..errors import PermissionDenied, SyncError, Unreachable
from . import views as problems
from .views import (
    HolderView,
    Kind,
    Listening,
    MarkView,
    NameView,
    Problem,
    Queued,
    WaiterView,
    absent,
    channels,
    holder,
    listening_in,
    queued,
    waiter,
)

TOMBSTONES = 16
"""Number of permits that are read beyond those shown."""

HOLDERS, LEFT, FENCE, STATE = "who holds it", "the time left of its lease", "its fence", "its limit and fences"
QUEUE, ALIVE, MARK = "its queue", "which of its waiters are alive", "the mark of its job"
"""The facts that a server may refuse to show, in words."""

KINDS: dict[PermitKind, Kind] = {
    "sem": "semaphore",
    "rw": "read_write",
    "event": "event",
    "latch": "latch",
    "barrier": "barrier",
}


def kind_of(keys: Keys) -> Kind:
    """Return the kind of a name, as far as its keys tell."""
    if isinstance(keys, PermitKeys):
        return KINDS[keys.kind]
    return "robust" if keys.family == "robust" else "lock"


class Reading(ABC):
    """The replies about one name: `first_asked`, `first`, `then_asked` and `view` follow each other."""

    kind: Kind
    moved: ReplyError | None = None
    """The reply that another shard has the name, if there was one."""
    refused: ReplyError | None = None
    """The first error among the replies, other than of optional facts."""
    stale = False
    """Whether it has to be read again: it changed between the rounds, or the first one has not listed enough."""
    _queue_at = 1
    _found = False
    """Whether there is a holder."""
    _fence: int | None = None
    _now = 0

    def __init__(self, keys: Keys, shown: int) -> None:
        self.name = keys.name
        self.keys = keys
        """All keys that are read."""
        self._queue, self._polls = keys.all[self._queue_at], keys.all[3]
        self.shown = shown
        self.tickets: list[Queued] = []
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
        """Whether the server has anything of it."""
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

    def channels(self) -> set[bytes]:
        """Return what all processes in it listen to if they are connected."""
        return channels(self._tokens(), self.tickets)

    def absent(self, listening: Listening) -> set[bytes]:
        """Return the presences of the processes that hold it and are not connected to this server."""
        return absent(self._tokens(), listening)

    def _queue_asked(self) -> list[Words]:
        return [(b"ZCARD", self._queue), (b"ZRANGE", self._queue, 0, self.shown - 1, b"WITHSCORES")]

    def _take_queue(self, number: Reply, tickets: Reply) -> None:
        found = pairs(self._usable(tickets, self._queue, QUEUE, []))
        self.tickets = queued(found)
        self._queued = self._usable(number, self._queue, QUEUE, 0) - (len(found) - len(self.tickets))

    def _polled(self) -> list[Queued]:
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
        found = [waiter(one, self._now, permits, until.get(one.member), listening, polls_known) for one in rest]
        if dead := [it for it in found if it.alive is False]:
            self.problems.append(problems.dead_waiters(dead))
        return found, max(len(found), self._queued - (len(self.tickets) - len(rest)))

    def _judge_keys(self, fence: int | None) -> None:
        if self._refused:
            self.problems.append(problems.unreadable(self._refused))
        if self._wrong:
            self.problems.append(problems.wrong_type(self._wrong))
        if fence is not None and fence - self._now > problems.CLOCK:
            self.problems.append(problems.clock_behind((fence - self._now) / 1e6))


class LockReading(Reading):
    """A lock, as its keys tell."""

    def __init__(self, keys: LockKeys, shown: int) -> None:
        super().__init__(keys, shown)
        self.kind = kind_of(keys)
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
        robust, mark = bool(replies) and isinstance(replies[0], bytes), None
        if self._mark_left != -2 and replies:
            mark, replies = self._mark_view(replies[1]), [replies[0], *replies[2:]]
        holders = () if self._holder is None else (self._holder_view(self._holder, listening),)
        waiters, waiting = self._waiters(replies[1:], 0, listening, self._tokens())
        if holders and self._holder is not None:
            self._judge_holder(holders[0], self._holder)
        known = self._readable(self._key, HOLDERS)
        if known and not holders and any(it.alive is not False for it in waiters):
            self.problems.append(problems.queue_without_holder(waiters[0].polls))
        self._judge_keys(self._fence)
        held = len(holders)
        return NameView(
            text(self.name),
            "robust" if robust else self.kind,
            address,
            holders,
            tuple(waiters),
            held,
            waiting,
            1,
            1 - held if known else None,
            self._fence,
            tuple(self.problems),
            mark,
        )

    def _holder_view(self, token: bytes, listening: Listening) -> HolderView:
        ours = token == self._granted != b""
        fence = self._fence if ours else None
        endless = self._left == -1 or not self._readable(self._key, LEFT)
        left = None if endless else max(0, self._left) / 1000  # -2: it has just expired
        foreign = not ours and self._readable(self._fence_key, FENCE)
        return holder(token, self._now, fence, left, foreign=foreign, listening=listening)

    def _judge_holder(self, one: HolderView, token: bytes) -> None:
        if one.foreign and one.host is not None:
            self.problems.append(problems.fence_lost())
        elif one.foreign and self._left == -1:
            self.problems.append(problems.foreign_without_ttl(self._key, token))
        if self._left == -1 and one.connected is False:
            self.problems.append(problems.holder_disconnected(self._key, token, one))


class PermitReading(Reading):
    """A semaphore, or something else that consists of permits, as its keys tell."""

    _queue_at = 2

    def __init__(self, keys: PermitKeys, shown: int, more: int) -> None:
        super().__init__(keys, shown)
        self._most = shown + more
        self._permits, self._state = keys.all[:2]
        self.kind = kind_of(keys)
        self._gate = self.kind in NEVER_HELD
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
            self.problems.append(problems.permits_lost())
        if self.kind == "barrier" and self._limit > 0:
            self.problems.append(problems.broken())
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
        if (
            known
            and not (holders or self._gate or self._limit == PAUSED_LIMIT)
            and any(it.alive is not False for it in waiters)
        ):
            self.problems.append(problems.queue_without_holder(waiters[0].polls))
        if not (shared or self._gate) and held > self._limit > 0:
            self.problems.append(problems.over_limit(held, self._limit))
        self._judge_keys(self._fence)
        limit = None if shared or self._gate else stated_limit(self._limit)
        return NameView(
            text(self.name),
            self.kind,
            address,
            tuple(holders),
            tuple(waiters),
            held,
            waiting,
            limit,
            None if limit is None or not known else max(0, limit - held),
            self._fence,
            tuple(self.problems),
        )


def reading_of(keys: Keys, shown: int, more: int = TOMBSTONES) -> Reading:
    """Return what reads one name, with the first ``shown`` holders and waiters.

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


# -- One server, asked by plain commands that only read, over a connection of the caller's pool ----------------


COUNT = 1000
"""Keys that one SCAN looks at: less than a millisecond of the server's time."""
BATCH = 250
"""Names that are read in one round trip."""


class CheckOut(Protocol):
    """Checks out a connection; with ``fresh`` it opens one."""

    async def __call__(self, *, fresh: bool = False) -> CheckedOut: ...


class Server:
    """A server whose names are read."""

    def __init__(self, connection: CheckedOut) -> None:
        self._connection = connection
        self.address = connection.address
        self.time = 0
        """When it answered last, in microseconds by its own clock."""
        self._cursor: bytes | None = b"0"

    async def give_back(self) -> None:
        """Give the connection back."""
        await self._connection.give_back()

    async def give_up(self) -> None:
        """Close the connection after an error: it may be of no use any more."""
        self._connection.in_step = False
        await self._connection.give_back()

    async def ask(self, questions: Sequence[Sequence[Words]]) -> list[Replies]:
        """Send the commands of several names, and return the replies to each."""
        words: list[Words] = [(b"TIME",), *(words for commands in questions for words in commands)]
        found = await self._connection.exchange([pack(one) for one in words], raw=range(len(words)))
        replies = iter(with_own_errors(found))
        self.time = microseconds(_checked(next(replies)))
        return [[next(replies) for _ in commands] for commands in questions]

    async def scan(self, pattern: bytes, prefix: bytes) -> list[Keys] | None:
        """Return the names whose keys the next step of a SCAN finds, those of each once; None when it has ended."""
        if self._cursor is None:
            return None
        match = b"%b*%b*%b" % (prefix, pattern, KEY_ENDINGS)
        ((reply,),) = await self.ask([[(b"SCAN", self._cursor, b"MATCH", match, b"COUNT", COUNT)]])
        cursor, keys = _checked(reply)
        self._cursor = None if cursor == b"0" else cursor
        return list(dict.fromkeys(found for key in keys if (found := keys_around(key, prefix)) is not None))

    async def listening(self, channels: Iterable[bytes]) -> dict[bytes, bool]:
        """Return of each channel whether anybody listens; nothing if the user may not ask that, or at a replica.

        The processes of an application are connected to its primary, so that nobody listens here says nothing of them.
        """
        asked = sorted(set(channels))
        if not asked:
            return {}
        ((reply,),) = await self.ask([[(b"PUBSUB", b"NUMSUB", *asked)]])
        found = listening_in(reply)
        return found if all(found.values()) or not await self._replica() else {}

    async def _replica(self) -> bool:
        """Return whether this server is known to be a replica."""
        ((reply,),) = await self.ask([[(b"INFO", b"replication")]])
        return isinstance(reply, bytes) and b"role:slave" in reply


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, ReplyError):
        raise reply
    return reply


@asynccontextmanager
async def opened(check_out: CheckOut) -> AsyncIterator[Server]:
    """Use a connection, and give it back in the end; raise OUT_OF_REACH.

    An idle connection may have been closed by a server that was restarted, so it is tried first. If it is of no use, a
    new one is opened in its place.
    """
    server = Server(await check_out())
    try:
        await server.ask([])
    except OUT_OF_REACH:
        await server.give_up()
        server = Server(await check_out(fresh=True))
    except BaseException:
        await server.give_up()
        raise
    try:
        yield server
    except BaseException:
        await server.give_up()
        raise
    await server.give_back()


async def heard(servers: Iterable[CheckOut], channels: set[bytes]) -> dict[bytes, bool]:
    """Return of each channel whether anybody listens at one of ``servers``; only of those that all of them told."""
    found = dict.fromkeys(channels, False)
    for check_out in servers:
        try:
            async with opened(check_out) as server:
                here = await server.listening(found)
        except OUT_OF_REACH:
            here = {}
        found = {channel: found[channel] or here[channel] for channel in here}
    return found


@asynccontextmanager
async def reading(client: RedisClient) -> AsyncIterator[None]:
    """Turn what goes wrong while names are read into our errors."""
    try:
        yield
    except (ReplyError, *OUT_OF_REACH) as error:
        refused = answered(b"", error)
        if refused is not None:
            if refused.code == "NOPERM":
                refused = PermissionDenied.of_inspection(str(error_answer(error)))
            raise refused from error
        raise Unreachable.of_inspection(address_of(client), error) from error


def batches(names: Sequence[Keys]) -> Iterator[Sequence[Keys]]:
    """Iterate over ``names``, so many at a time that others can use the server in between."""
    for first in range(0, len(names), BATCH):
        yield names[first : first + BATCH]
