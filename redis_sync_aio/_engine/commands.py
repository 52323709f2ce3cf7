"""The scripts for locks and permits: calls that run them, and their decoded replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from .._client.replies import Argument, Reply, Words, pack
from .._core.keys import Keys, LockKeys, MarkKeys, PermitKeys
from .._scripts import load
from .._scripts.constants import CONTENDED, FREE_MS, Outcome, Renewed
from .._transport.call import Call
from .._transport.cluster_link import ClusterLink
from .._transport.link import Link
from .._transport.witness import Witness

# -- Decoded replies of the scripts, and decoded messages of our inbox -----------------------------------------


class Answer(NamedTuple):
    """A decoded answer of an acquire script, other than a plain grant."""

    outcome: Outcome
    # QUEUED: 1 if the ticket is new in the queue; GRANTED, OWN: the fence; MISMATCH, TOO_HEAVY: the server's limit;
    # QUEUE_FULL: how many tickets there are
    number: int
    left: float | None  # seconds until the holder's lease ends; None: never, or it is not held
    server_time: float  # seconds
    more: int  # BUSY, QUEUED: a Look; GRANTED, OWN: the weight; MISMATCH: 1 if the limit was set by a resize
    previous: int = 0  # of a writer: the fence of the writer before it; 0: the server remembers none


_OUTCOMES = tuple(Outcome)  # by their numbers: far faster than a call of the class


def read_acquire(reply: Reply) -> Answer:
    """Decode a reply of an acquire script that is no int: an int is the fence of a grant of the whole ttl."""
    outcome, number, left, micros, more, *previous = reply
    return Answer(_OUTCOMES[outcome], number, _left(left), micros / 1e6, more, *previous)


def left_free(reply: Reply) -> bool:
    """Return whether lock/acquire_all.lua found this lock free, and did not take it because others are not."""
    return type(reply) is list and reply[0] == Outcome.BUSY and reply[2] == FREE_MS


def read_renew(reply: Reply) -> Renewed:
    """Decode a reply of a renew script."""
    return Renewed(reply[0])


def _left(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


FENCES = 10**16
"""More than any fence, or any time in microseconds until the year 2286, and any duration in milliseconds."""
MESSAGE_BYTES = 200
"""More than any message has."""


class Pushed(NamedTuple):
    """A message in our inbox: a grant (fence > 0), ASK_AGAIN, CONTENDED, or word that the ticket is next (fence 0)."""

    number: int
    fence: int
    server_time: float  # seconds
    duration: float  # of the grant, or until the present holder's lease ends; 0 = forever
    contended: bool  # whether other requests wait for it
    following: int  # the number of the next ticket, if it is of this process; else 0
    next_duration: float  # until the end of the lease that this ticket waits for
    previous: int = 0  # as in `Answer`


def read_push(payload: bytes) -> Pushed:
    """Decode a message from settle() in lock_queue.lua or permit_queue.lua. Raises ValueError for any other."""
    if len(payload) > MESSAGE_BYTES:
        raise ValueError("too long")
    number, fence, micros, ms, *more = map(int, payload.split())
    previous = more.pop() if len(more) % 2 else 0  # before it there is a pair, if other requests wait
    following, then = more or (0, ms)
    times_fit = 0 <= micros < FENCES and -FENCES < ms < FENCES and -FENCES < then < FENCES
    if not (times_fit and CONTENDED <= fence < FENCES and 0 <= previous < FENCES):
        raise ValueError("out of range")
    return Pushed(number, fence, micros / 1e6, ms / 1000, bool(more), following, then / 1000, previous)


class Commands:
    """The scripts by name. Each method makes a ``call`` one of its script, and sends it."""

    def __init__(self, link: Link | ClusterLink | Witness) -> None:
        self.link = link

    def _send(self, call: Call, script: str, keys: Keys, words: tuple[Argument, ...]) -> None:
        self.link.send(call.of(keys, load(script), words))

    def acquire(
        self,
        keys: Keys,
        token: bytes,
        call: Call,
        *,
        ttl_ms: int,
        ticket: bytes,
        poll_ms: int,
        more: tuple[Argument, ...],
    ) -> None:
        """Request the lock or permit of ``keys``; with a ``ticket`` (not empty) also a place in its queue.

        ``more``: weight, limit and an option for permits; for locks 1 if the token may be used again.
        """
        words: tuple[Argument, ...] = (token, ttl_ms, ticket, poll_ms, *more)
        call.keys, call.script, call.arguments = keys, load(keys.kind.acquire), words
        self.link.send(call)

    def acquire_all(
        self,
        keys: LockKeys,
        prefix: bytes,
        numbers: Iterable[int],
        call: Call,
        *,
        ttl_ms: int,
    ) -> None:
        """Request all of `joined_keys` together, each for the token of ``prefix`` and its number. Does not queue."""
        words = (ttl_ms, prefix, b" ".join(b"%d" % number for number in numbers))
        self._send(call, "lock/acquire_all", keys, words)

    def attach(
        self, keys: Keys, token: bytes, call: Call, *, ttl_ms: int, replaced: bytes, undoes: bool = False
    ) -> None:
        """Let ``token`` hold what ``replaced`` holds, which was detached. ``undoes``: as `Call.undoes`."""
        words: tuple[Argument, ...] = (token, ttl_ms, replaced)
        call.undoes = undoes
        self._send(call, f"{keys.family}/attach", keys, words)

    def release(
        self,
        keys: Keys,
        token: bytes,
        call: Call,
        *,
        ticket: bytes = b"",
        pending: bool = False,
        release_args: tuple[Argument, ...] = (),
        undoes: bool = False,
    ) -> None:
        """Release the lease of ``token``, and withdraw its ``ticket``; either may be empty.

        ``pending``: a copy of the acquire that this ends may still be in flight, and must find its token spent.
        ``release_args``: of a robust lock, the writer of its record, and what becomes of the record (empty: it was not
        adopted). ``undoes``: as `Call.undoes`; true, too, if it is ``pending`` or has a ticket.
        """
        words: tuple[Argument, ...] = (token, ticket, b"1" if pending else b"0", *release_args)
        call.undoes = pending or undoes or ticket != b""
        call.keys, call.script, call.arguments = keys, load(keys.kind.release), words
        self.link.send(call)

    def renew(
        self,
        keys: Keys,
        token: bytes,
        call: Call,
        *,
        ttl_ms: int,
        more: tuple[Argument, ...] = (),
        weight: int = 1,
    ) -> None:
        """Let the lease of ``token`` end ``ttl_ms`` from now; ``more``: how many fences a process that shares needs.

        ``weight``: the weight of a permit. A permit that weighs less is another one, and is not renewed.
        """
        size: tuple[Argument, ...] = (weight,) if isinstance(keys, PermitKeys) else ()
        words: tuple[Argument, ...] = (token, ttl_ms, *size, *more)
        self._send(call, keys.kind.renew, keys, words)

    def downgrade(self, keys: Keys, token: bytes, call: Call, *, undoes: bool = False) -> None:
        """Turn the writer of ``token`` into a reader. ``undoes``: as `Call.undoes`."""
        call.undoes = undoes
        self._send(call, "permits/downgrade", keys, (token,))

    def adopt(self, keys: Keys, token: bytes, words: tuple[Argument, ...], call: Call) -> None:
        """Read the record that the last holder of a robust lock left, and put that of ``token`` in its place.

        ``words`` as in robust/adopt.lua, from the fence on.
        """
        self._send(call, "robust/adopt", keys, (token, *words))

    def record(self, keys: Keys, token: bytes, words: tuple[Argument, ...], call: Call) -> None:
        """Record how far the work of ``token`` has come; ``words`` as in robust/record.lua, from the fence on."""
        self._send(call, "robust/record", keys, (token, *words))

    def gate(self, keys: Keys, fence: bytes, ttl_ms: int, call: Call) -> None:
        """Accept a fence, unless a higher one was accepted before. With an empty fence only read the highest."""
        self._send(call, "fence_gate/accept", keys, (fence, ttl_ms))

    def mark(self, keys: MarkKeys, words: tuple[Argument, ...], call: Call) -> None:
        """Read the mark next to a lock, or change it; ``words`` as in lock/mark.lua."""
        self._send(call, "lock/mark", keys, words)

    def force(self, keys: Keys, call: Call) -> None:
        """Take the lock away from its holder. Not repeated when its answer is lost."""
        call.at_most_once = True
        self._send(call, "lock/force_release", keys, ())

    def read(self, keys: Keys, commands: Iterable[Words], call: Call) -> None:
        """Run ``commands``, which only read, at one moment. The reply begins with that of TIME; errors are in place."""
        self._send(call, "link/read", keys, (b"".join(map(pack, commands)),))

    def resize(self, keys: Keys, limit: int, call: Call) -> None:
        """Set the limit of permits, which is as `wire_limit` returns it."""
        self._send(call, "permits/resize", keys, (limit,))

    def count_down(self, keys: Keys, words: tuple[Argument, ...], call: Call) -> None:
        """Count a gate down, or close it; ``words`` as in permits/count_down.lua."""
        self._send(call, "permits/count_down", keys, words)

    def break_barrier(self, keys: Keys, words: tuple[Argument, ...], call: Call) -> None:
        """Break a barrier, or reset it; ``words`` as in barrier/break.lua."""
        self._send(call, "barrier/break", keys, words)


Send: TypeAlias = Callable[[Commands, Call], None]
"""A function that sends one command."""
