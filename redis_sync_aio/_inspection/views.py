"""The views of an inspection: names, their holders and waiters, their problems, and the patterns that choose them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._core.display import shown, text
from .._core.keys import Kind, SlotState

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
            None: not known (of readers, and of clients of other libraries).
        remaining: Seconds until the lease ends if it is not renewed. None: it has no end, or it is not readable.
        fence: The fence of that grant. Of a process that shares a lock, the last one that is reserved for its tasks.
        weight: How many permits it has. 1 for locks, for both sides of a read/write lock, and if the user may not read
            it.
        access: "read" or "write" of a read/write lock. None: it is something else, or the user may not read it.
        foreign: True if a client of another library wrote it. False as well if the user may not read what tells.
        connected: True if the process is connected to the server (in a cluster: to any shard). False: it has ended, is
            cut off, or polls since the server refused it messages. None: it has polled from the start, or is not known
            (a token without a process, a replica, a user that may not ask).
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
        waited: Seconds since it was queued. None: an older version queued it.
        weight: How many permits it asks for. 1 for locks, and for both sides of a read/write lock.
        access: "read" or "write" of a read/write lock. None: it is something else.
        polls: True if it asks from time to time. Others are woken by a message.
        alive: True if a process listens for the grant, or has polled lately. False: the next release passes it over.
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
        """True if it has no holder, no waiter and no problem."""
        return not (self.held or self.holders or self.waiting or self.problems)


# -- Patterns for names, as Redis has them for keys: ``*``, ``?``, ``[abc]``, ``[^a]``, ``[a-z]``, and a backslash


_UNFINISHED = re.compile(rb"(?:[^\[\\]|\\.|\[(?:\\.|[^\]\\])*\])*", re.DOTALL)
"""Everything before an opening bracket without its end, or before a backslash at the end."""
_PARTS = re.compile(rb"(\*+)|(\?)|\[(\^?)((?:\\.|[^\]\\])*)\]?|\\(.)|(.)", re.DOTALL)
ANYTHING = b"any-name"
"""The text that a star stands for in a sample. No other pattern is likely to match it."""
_TRIED = [*b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *range(256)]
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


def exact(pattern: bytes) -> bytes | None:
    """Return the only name that ``pattern`` matches; None if it may match others."""
    literals = [part[5] or part[6] for part in _PARTS.finditer(pattern)]
    return None if None in literals else b"".join(literals)


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
