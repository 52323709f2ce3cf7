"""The views of an inspection: names, their holders and waiters, their problems, and the patterns that choose them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .._client.replies import Reply, ReplyError
from .._core.display import not_a_lock, release_command, shown, text
from .._core.keys import Maker, SlotState, label_of
from .._engine.snapshot import Ticket
from .._scripts.constants import POLLERS_TICKET, WRITER_WEIGHT
from ..errors._base import page

Kind: TypeAlias = Literal["lock", "robust", "semaphore", "read_write", "event", "latch", "barrier"]
"""The kind of a name, as its keys on the server show."""

Access: TypeAlias = Literal["read", "write"]
"""The side of a read/write lock."""

ProblemCode: TypeAlias = Literal[
    "foreign_without_ttl",
    "holder_disconnected",
    "dead_waiters",
    "queue_without_holder",
    "fence_lost",
    "permits_lost",
    "over_limit",
    "broken",
    "clock_behind",
    "wrong_type",
    "unreadable",
]
"""The kinds of problems of a name."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about a name that looks wrong.

    Attributes:
        code: The kind of problem, as in
            [Problems](https://redis-sync-aio.github.io/redis-sync-aio/operations/inspection/#problems).
        meaning: What is wrong, in words, and what to do.
    """

    code: ProblemCode
    meaning: str

    def __str__(self) -> str:
        return self.meaning


@dataclass(frozen=True, slots=True)
class HolderView:
    """A holder, as the server knows it.

    Attributes:
        token: The token or identity of the holder.
        identity: The identity, if the caller chose one. None: the token is from this package.
        label: The text by which people know the holder: its label, else that of its coordinator, which is "host:pid"
            unless it was given another; else the token.
        host: The host of the process that holds it, if the token says so.
        pid: The id of that process, if the token says so.
        held_for: Seconds since it was granted; for tasks that share, since the server last gave their process fences.
            None: the server does not know it (of readers, and of clients of other libraries).
        remaining: Seconds until the lease ends if it is not renewed. None: it has no end, or it is not readable.
        fence: The fence of that grant. Of a process that shares a lock, the last one that is reserved for its tasks.
        weight: How many permits it has. 1 for locks, for both sides of a read/write lock, and if the user may not read
            it.
        access: "read" or "write" of a read/write lock. None: it is something else, or the user may not read it.
        foreign: Whether a client of another library wrote it. False as well if the user may not read what tells.
        connected: Whether the process is connected to the server (in a cluster: to any shard). False: it has ended, is
            cut off at the moment, or polls since the server refused it messages. None: it has polled from the start,
            the token does not name a process, or the server does not tell (a replica, or a user that may not ask).
        task: The name of the task that acquired it, in `Coordinator.statistics`. None: it has ended, or an identity or
            another lease owns it.
    """

    token: str
    identity: str | None
    label: str
    host: str | None
    pid: int | None
    held_for: float | None
    remaining: float | None
    fence: int | None
    weight: int = 1
    access: Access | None = None
    foreign: bool = False
    connected: bool | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class WaiterView:
    """A request in the queue, as the server knows it. Tasks that share a lease wait with one request.

    Attributes:
        token: The token or identity of the request. Empty: in `Coordinator.statistics`, a task that shares, and waits
            behind another one of its process.
        identity: The identity, as for `HolderView`.
        label: The text by which people know the waiter, as for `HolderView`.
        host: The host of the process that waits, if the token says so.
        pid: The id of that process, if the token says so.
        waited: Seconds since it was queued. None: an older version queued it, or ``token`` is empty.
        weight: How many permits it asks for. 1 for locks, and for both sides of a read/write lock.
        access: "read" or "write" of a read/write lock. None: it is something else.
        polls: Whether it asks from time to time. Others are woken by a message.
        alive: Whether somebody listens for the grant, or has polled lately. False: the next release passes it over.
            None: the server does not tell, as for `HolderView.connected`, or the user may not read it.
        task: The name of the task that waits, in `Coordinator.statistics`. None: it is not known.
    """

    token: str
    identity: str | None
    label: str
    host: str | None
    pid: int | None
    waited: float | None
    weight: int = 1
    access: Access | None = None
    polls: bool = False
    alive: bool | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class MarkView:
    """The mark of a job: what became of its slot (`once`, `once_per`) or of its request (`idempotent`).

    Attributes:
        state: "done": a run has ended. "running": a run has the lock. "failed": a run began, and raised, was cancelled
            or was killed. None: the user may not read it, or another program wrote it.
        remaining: Seconds for which it is remembered. None: forever.
    """

    state: SlotState | None
    remaining: float | None


@dataclass(frozen=True, slots=True)
class NameView:
    """A lock, a semaphore, a read/write lock, an event, a latch or a barrier, as the server knows it.

    Attributes:
        name: Its name.
        kind: "lock", "robust" (a lock with a record of its work), "semaphore", "read_write", "event", "latch" or
            "barrier". A reentrant lock, and each name of a multi-lock, is a "lock".
        server: The address of the server, or the shard, that has it.
        holders: The holders, those whose lease ends first at the front; as many as were asked for.
        waiters: The requests in the queue, in order; as many as were asked for.
        held: How many permits are held; 1 for a lock that is held. Of a read/write lock the number of holders.
        waiting: How many requests are in the queue.
        limit: How many permits there are; 1 for a lock, 0 for a paused semaphore. None: of anything else but a
            semaphore, or not known.
        available: How many permits are free; None where ``limit`` is, and if the holders are not readable. Waiters come
            first.
        fence: The last fence that the server remembers, whether or not it is held now. None: it remembers none.
        problems: What looks wrong. Empty: nothing does.
        mark: The mark of the job with this name. None: there is none.
    """

    name: str
    kind: Kind
    server: str
    holders: tuple[HolderView, ...]
    waiters: tuple[WaiterView, ...]
    held: int
    waiting: int
    limit: int | None
    available: int | None
    fence: int | None
    problems: tuple[Problem, ...] = ()
    mark: MarkView | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody holds it or waits for it, and nothing looks wrong."""
        return not (self.held or self.holders or self.waiting or self.problems)


# -- Problems of a name, each in a sentence that says what it means and what to do -----------------------------


CLOCK = 1_000_000
"""Microseconds by which a fence may be ahead of the server's clock: a range of fences, or many grants in a row."""

TRANSIENT: frozenset[ProblemCode] = frozenset(
    {"holder_disconnected", "queue_without_holder", "fence_lost", "permits_lost", "dead_waiters"}
)
"""Problems that may only be the moment between two reads: they are looked at twice."""


def foreign_without_ttl(key: bytes, value: bytes) -> Problem:
    """Describe a key with a value of another program that will not end."""
    return Problem("foreign_without_ttl", not_a_lock(key, value))


def holder_disconnected(key: bytes, token: bytes, holder: HolderView) -> Problem:
    """Describe a lock without a ttl whose process is not connected."""
    return Problem(
        "holder_disconnected",
        f"process {holder.pid} on {holder.host} holds it without a ttl, and is not connected to the server: it has "
        "ended, is cut off, or polls since the server refused it messages (polling_instead in its log). Look there; if "
        f"it has ended, nobody else will release the lock, so do: {release_command(key, token)}",
    )


def dead_waiters(waiters: list[WaiterView]) -> Problem:
    """Describe tickets of processes that are not there any more."""
    number = len(waiters)
    whose = ", ".join(sorted({f"{it.host}:{it.pid}" if it.host else repr(it.token) for it in waiters})[:5])
    return Problem(
        "dead_waiters",
        f"{number} of its waiters {'is' if number == 1 else 'are'} gone ({whose}): nobody listens for the grant. "
        "There is nothing to do: the next release passes them over",
    )


def queue_without_holder(polled: bool) -> Problem:
    """Describe a queue that nobody is ahead of."""
    return Problem(
        "queue_without_holder",
        "requests wait although it is free: "
        + (
            "the first one polls and will take it at its next look"
            if polled
            else "its key was deleted by another program, or it expired. The waiters look again within their poll_cap "
            "(2.5 seconds); if it stays so, no process that waits is running"
        ),
    )


def fence_lost() -> Problem:
    """Describe a lock of ours whose fence key is gone."""
    return Problem(
        "fence_lost",
        "its holder's token is one of this package, but the key that remembers its fence is gone or names another "
        "grant: a memory limit evicted it, or another program wrote one of the two. Later fences are still greater; "
        "set maxmemory-policy to noeviction",
    )


def permits_lost() -> Problem:
    """Describe permits of which one key is gone."""
    return Problem(
        "permits_lost",
        "one of its two keys is gone, so nobody is known to hold anything, and its holders lose their leases at "
        "the next renewal: a memory limit evicted it, or another program deleted it. Set maxmemory-policy "
        "to noeviction",
    )


def over_limit(held: int, limit: int) -> Problem:
    """Describe permits of which more are held than there are."""
    return Problem(
        "over_limit",
        f"{held} permits are held, and the limit is {limit}: it was lowered by a resize. Nothing is granted until "
        "enough of them were released",
    )


def broken() -> Problem:
    """Describe a barrier that was broken, and not reset."""
    return Problem(
        "broken",
        "a party ended while it waited, or abort() was called: the barrier is broken, so all parties that come get "
        "BrokenBarrierError. Once all have got it, await AsyncBarrier(…).reset()",
    )


def clock_behind(ahead: float) -> Problem:
    """Describe a fence from the future."""
    return Problem(
        "clock_behind",
        f"its last fence is {ahead:.1f} seconds ahead of the server's clock: that clock was set back, or the data came "
        "from a server whose clock is ahead. Fences go on rising; compare the clocks of the servers",
    )


def wrong_type(keys: list[bytes]) -> Problem:
    """Describe keys that are no lock's."""
    return Problem(
        "wrong_type",
        f"another program uses {', '.join(map(text, keys))} for something else, so requests fail with WrongKeyType. "
        "Give the lock another name, or delete the key if nobody needs what is in it",
    )


def unreadable(refused: Mapping[str, str]) -> Problem:
    """Describe a name of which the user may not read these facts, with the answers of the server."""
    *facts, last = refused
    answer = next(iter(refused.values())).rstrip(".")
    return Problem(
        "unreadable",
        f"the server refused to show {', '.join(facts)}{' and ' if facts else ''}{last}: {answer}. "
        f"Extend the rights of this user: {page('operations/inspection', 'rights')}",
    )


# -- Holders and waiters, as tokens and tickets tell of them ---------------------------------------------------


Listening: TypeAlias = Mapping[bytes, bool]
"""Of each channel whether anybody listens; without those that are not known."""

FIRST_TIME = 10**15
"""Microseconds; a score below it is a place in a queue, not the time when a ticket came."""


class Queued(NamedTuple):
    """A ticket in the queue, and what is known of it."""

    member: bytes
    ticket: Ticket
    since: float | None  # server time in microseconds


def queued(members: Iterable[tuple[bytes, float]]) -> list[Queued]:
    """Return the tickets among the members of a queue, which come with their scores."""
    return [
        Queued(member, ticket, score if score >= FIRST_TIME else None)
        for member, score in members
        if member != POLLERS_TICKET and (ticket := Ticket.parse(member)) is not None
    ]


def channels(tokens: Iterable[bytes], tickets: Iterable[Queued]) -> set[bytes]:
    """Return what the processes that hold and wait listen to if they are connected."""
    found = {one.ticket.inbox for one in tickets if one.ticket.inbox}
    for maker in map(Maker.of, tokens):
        if maker is not None and not maker.polls:
            found |= {maker.inbox, maker.presence}
    return found


def listening_in(reply: Reply) -> dict[bytes, bool]:
    """Return of each channel in a reply to PUBSUB NUMSUB whether anybody listens; nothing if that was refused."""
    if isinstance(reply, ReplyError):
        return {}
    numbers = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {channel: int(number) > 0 for channel, number in numbers}


def absent(tokens: Iterable[bytes], listening: Listening) -> set[bytes]:
    """Return the presences of the processes that hold and are not connected to this server."""
    makers = [maker for token in tokens if (maker := Maker.of(token)) is not None]
    return {maker.presence for maker in makers if _connected(maker, listening) is False}


def _connected(maker: Maker, listening: Listening) -> bool | None:
    """Return whether the process listens to its inbox of then, or has another one now; None if nothing tells."""
    if maker.polls or maker.presence not in listening:
        return None
    return listening.get(maker.inbox, False) or listening[maker.presence]


def waiter(
    one: Queued, now: int, permits: int, polls_until: Reply, listening: Listening, polls_known: bool = True
) -> WaiterView:
    """Return what is known of a ticket.

    ``permits``: the limit; 0: of a lock. ``polls_until``: the score in POLLS, which ``polls_known`` says may be read.
    """
    ticket, maker = one.ticket, Maker.of(one.ticket.token)
    polls = not ticket.inbox
    if not polls:
        alive = listening.get(ticket.inbox)
    else:
        alive = polls_until is not None and float(polls_until) * 1000 > now if polls_known else None
    return WaiterView(
        token=text(ticket.token),
        identity=text(ticket.token) if maker is None else None,
        label=label_of(ticket.token),
        host=maker.host if maker else None,
        pid=maker.pid if maker else None,
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
    """Return what is known of a holder. ``remaining``: seconds; ``permits``: the limit; 0: of a lock."""
    maker = Maker.of(token)
    side = access(weight, permits)
    held_for = None if fence is None or side == "read" else max(0.0, (now - fence) / 1e6)
    return HolderView(
        token=text(token),
        identity=text(token) if maker is None and not foreign else None,
        label=label_of(token),
        host=maker.host if maker else None,
        pid=maker.pid if maker else None,
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


# -- Patterns for names, as Redis has them for keys: ``*``, ``?``, ``[abc]``, ``[^a]``, ``[a-z]``, and a backslash


_UNFINISHED = re.compile(rb"(?:[^\[\\]|\\.|\[(?:\\.|[^\]\\])*\])*", re.DOTALL)
"""Everything before an opening bracket without its end, or before a backslash at the end."""
_PARTS = re.compile(rb"(\*+)|(\?)|\[(\^?)((?:\\.|[^\]\\])*)\]?|\\(.)|(.)", re.DOTALL)
ANYTHING = b"any-name"
"""The text that a star stands for in a sample. No other pattern is likely to match it."""
_TRIED = [*b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *range(256)]
_ESCAPED = re.compile(r"([*?\[\]\\])")
_IN_CLASS = re.compile(rb"\\(.)|([^\\])-([^\\])|([^\\])", re.DOTALL)


def check(pattern: bytes) -> None:
    """Raise ValueError for a pattern that has no end: keys behind the name could not be told from it."""
    finished = _UNFINISHED.match(pattern)
    if finished is None or finished.end() == len(pattern):
        return
    wrong = "a [ without its ]" if pattern[finished.end() :].startswith(b"[") else "a single backslash at its end"
    raise ValueError(
        f"the pattern {shown(text(pattern))} has {wrong}, and would match nothing: if that character belongs to "
        "the name, put a backslash before it"
    )


def literal(name: str) -> str:
    """Return the pattern that matches ``name`` alone."""
    return _ESCAPED.sub(r"\\\1", name)


def exact(pattern: bytes) -> bytes | None:
    """Return the only name that ``pattern`` matches; None if it may match others."""
    found = b""
    for part in _PARTS.finditer(pattern):
        literal = part[5] or part[6]
        if literal is None:
            return None
        found += literal
    return found


def sample(pattern: bytes) -> bytes | None:
    """Return a text that ``pattern`` matches; None if there is none."""
    found = b""
    for part in _PARTS.finditer(pattern):
        if part[1]:
            found += ANYTHING
        elif literal := part[5] or part[6]:
            found += literal
        else:
            matches = re.compile(_translated(part), re.DOTALL).fullmatch
            one = next((it for it in (bytes([byte]) for byte in _TRIED) if matches(it)), None)
            if one is None:
                return None
            found += one
    return found


def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Return ``pattern`` as a regular expression, which matches as the server would."""
    return re.compile(b"".join(map(_translated, _PARTS.finditer(pattern))), re.DOTALL)


def _translated(part: re.Match[bytes]) -> bytes:
    several, one, negated, inside, escaped, literal = part.groups()
    if several:
        return b".*"
    if one:
        return b"."
    if inside is None:
        return re.escape(escaped or literal)
    members = b""
    for member in _IN_CLASS.finditer(inside):
        first, last = (member[2], member[3]) if member[2] else [member[1] or member[4]] * 2
        first, last = sorted((first, last))
        members += b"\\x%02x-\\x%02x" % (first[0], last[0])
    if not members:
        return b"." if negated else b"(?!)"
    return b"[%b%b]" % (b"^" if negated else b"", members)
