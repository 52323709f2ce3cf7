"""The scripts for locks and permits: calls that run them, and their decoded replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .._client.replies import Argument, Reply, Words, pack
from .._core.keys import Keys, LockKeys, MarkKeys, PermitKeys
from .._scripts import load
from .._scripts.constants import CONTENDED, FREE_MS, Outcome, Renewed
from .._transport.call import Call
from .._transport.cluster_link import ClusterLink
from .._transport.link import Link
from ..errors import CommandRefused

# -- Decoded replies of the scripts, and decoded messages of our inbox -----------------------------------------


class Answer(NamedTuple):
    """A decoded answer of an acquire script, other than a plain grant."""

    outcome: Outcome
    # QUEUED: 1 if the ticket is new in the queue; GRANTED, OWN: the fence; MISMATCH, TOO_HEAVY: the server's limit;
    # QUEUE_FULL: how many tickets there are
    number: int
    left: float | None  # seconds until the holder's lease ends; None: never, or nobody holds it
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


@dataclass(slots=True)  # not frozen: one is made for each command
class Delivery:
    """The time at which a command is sent, the time at which it expires, and the receiver of the answered call."""

    sent: float
    """Local time, not later than now."""
    expires: float
    """Local time; the command is not sent again after it."""
    done: Callable[[Call], None]


class Commands:
    """Builds the calls. Each method sends one script and returns its call immediately."""

    def __init__(self, link: Link | ClusterLink) -> None:
        self.link = link

    def _send(self, script: str, keys: Keys, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        call = Call(keys, load(script), words, delivery.sent, delivery.expires, delivery.done)
        self.link.send(call)
        return call

    def acquire(
        self,
        keys: Keys,
        token: bytes,
        delivery: Delivery,
        *,
        ttl_ms: int,
        ticket: bytes,
        poll_ms: int,
        more: tuple[Argument, ...],
    ) -> Call:
        """Request the lock or permit of ``keys``; with a ``ticket`` (not empty) also a place in its queue.

        ``more``: weight, limit and an option for permits; for locks 1 if the token may be used again.
        """
        words: tuple[Argument, ...] = (token, ttl_ms, ticket, poll_ms, *more)
        call = Call(keys, load(keys.kind.acquire), words, delivery.sent, delivery.expires, delivery.done)
        self.link.send(call)
        return call

    def acquire_all(
        self,
        keys: LockKeys,
        prefix: bytes,
        numbers: Iterable[int],
        delivery: Delivery,
        *,
        ttl_ms: int,
    ) -> Call:
        """Request all of `joined_keys` together, each for the token of ``prefix`` and its number. Does not queue."""
        words = (ttl_ms, prefix, b" ".join(b"%d" % number for number in numbers))
        return self._send("lock/acquire_all", keys, words, delivery)

    def attach(
        self, keys: Keys, token: bytes, delivery: Delivery, *, ttl_ms: int, replaced: bytes, undoes: bool = False
    ) -> Call:
        """Let ``token`` hold what ``replaced`` holds, which was detached. ``undoes``: as `Call.undoes`."""
        words: tuple[Argument, ...] = (token, ttl_ms, replaced)
        call = Call(keys, load(f"{keys.family}/attach"), words, delivery.sent, delivery.expires, delivery.done)
        call.undoes = undoes
        self.link.send(call)
        return call

    def release(
        self,
        keys: Keys,
        token: bytes,
        delivery: Delivery,
        *,
        ticket: bytes = b"",
        about: object = None,
        pending: bool = False,
        release_args: tuple[Argument, ...] = (),
        undoes: bool = False,
    ) -> Call:
        """Release what ``token`` holds, and withdraw its ``ticket``; either may be empty.

        ``pending``: a copy of the acquire that this ends may still be in flight, and must find its token spent.
        ``release_args``: of a robust lock, the writer of its record, and what becomes of the record (empty: it was not
        adopted). ``undoes``: as `Call.undoes`; true, too, if it is ``pending`` or has a ticket.
        """
        words: tuple[Argument, ...] = (token, ticket, b"1" if pending else b"0", *release_args)
        call = Call(keys, load(keys.kind.release), words, delivery.sent, delivery.expires, delivery.done)
        call.context = about
        call.undoes = pending or undoes or ticket != b""
        self.link.send(call)
        return call

    def renew(
        self,
        keys: Keys,
        token: bytes,
        delivery: Delivery,
        *,
        ttl_ms: int,
        more: tuple[Argument, ...] = (),
        weight: int = 1,
        refused: Callable[[Call, CommandRefused], None] | None = None,
    ) -> Call:
        """Let the lease of ``token`` end ``ttl_ms`` from now; ``more``: how many fences a process that shares needs.

        ``weight``: the weight of a permit. A permit that weighs less is another one, and is not renewed. ``refused``:
        as `Call.refused`.
        """
        size: tuple[Argument, ...] = (weight,) if isinstance(keys, PermitKeys) else ()
        words: tuple[Argument, ...] = (token, ttl_ms, *size, *more)
        call = Call(keys, load(keys.kind.renew), words, delivery.sent, delivery.expires, delivery.done)
        call.refused = refused
        self.link.send(call)
        return call

    def downgrade(self, keys: Keys, token: bytes, delivery: Delivery, *, undoes: bool = False) -> Call:
        """Turn the writer of ``token`` into a reader. ``undoes``: as `Call.undoes`."""
        call = Call(keys, load("permits/downgrade"), (token,), delivery.sent, delivery.expires, delivery.done)
        call.undoes = undoes
        self.link.send(call)
        return call

    def adopt(self, keys: Keys, token: bytes, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        """Read the record that the last holder of a robust lock left, and put that of ``token`` in its place.

        ``words`` as in robust/adopt.lua, from the fence on.
        """
        return self._send("robust/adopt", keys, (token, *words), delivery)

    def record(self, keys: Keys, token: bytes, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        """Record how far the work of ``token`` has come; ``words`` as in robust/record.lua, from the fence on."""
        return self._send("robust/record", keys, (token, *words), delivery)

    def gate(self, keys: Keys, fence: bytes, ttl_ms: int, delivery: Delivery) -> Call:
        """Accept a fence, unless a higher one was accepted before. With an empty fence only read the highest."""
        return self._send("fence_gate/accept", keys, (fence, ttl_ms), delivery)

    def mark(self, keys: MarkKeys, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        """Read the mark next to a lock, or change it; ``words`` as in lock/mark.lua."""
        return self._send("lock/mark", keys, words, delivery)

    def force(self, keys: Keys, delivery: Delivery) -> Call:
        """Take the lock away from its holder. Not repeated when its answer is lost."""
        call = Call(keys, load("lock/force_release"), (), delivery.sent, delivery.expires, delivery.done)
        call.at_most_once = True
        self.link.send(call)
        return call

    def read(self, keys: Keys, commands: Iterable[Words], delivery: Delivery) -> Call:
        """Run ``commands``, which only read, at one moment. The reply begins with that of TIME; errors are in place."""
        return self._send("link/read", keys, (b"".join(map(pack, commands)),), delivery)

    def resize(self, keys: Keys, limit: int, delivery: Delivery) -> Call:
        """Set the limit of permits, which is as `wire_limit` returns it."""
        return self._send("permits/resize", keys, (limit,), delivery)

    def count_down(self, keys: Keys, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        """Count a gate down, or close it; ``words`` as in permits/count_down.lua."""
        return self._send("permits/count_down", keys, words, delivery)

    def break_barrier(self, keys: Keys, words: tuple[Argument, ...], delivery: Delivery) -> Call:
        """Break a barrier, or reset it; ``words`` as in barrier/break.lua."""
        return self._send("barrier/break", keys, words, delivery)


Send: TypeAlias = Callable[[Commands, Delivery], Call]
"""A function that sends one command."""
