"""The lock's decisions, executed by scripts on the server: calls out, answers decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from .._keys import LockKeys
from .._link.call import Call, Executor, Reply
from .._scripts import load

FOR_EVER = 0
"""A ttl of 0 ms stands for a lock that does not expire."""


class Outcome(IntEnum):
    """What acquire.lua decided."""

    BUSY = 0
    GRANTED = 1
    QUEUED = 2
    OWN = 3
    SPENT = 4


class Released(IntEnum):
    """What release.lua found."""

    GONE = 0
    RELEASED = 1
    TAKEN = 2


class Renewed(IntEnum):
    """What renew.lua found."""

    GONE = 0
    RENEWED = 1
    TAKEN = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """A decoded answer of acquire.lua, other than a plain grant."""

    outcome: Outcome
    fence: int
    left: float | None  # seconds until the holder's lease ends; None: never, or nobody holds it
    server_time: float  # seconds
    soon: bool  # no release will wake us: look again soon


@dataclass(frozen=True, slots=True)
class View:
    """A decoded answer of inspect.lua."""

    holder: bytes | None
    left: float | None
    fence: int | None
    fence_token: bytes | None
    waiting: int
    tickets: tuple[bytes, ...]


def plain_grant(reply: Reply) -> bool:
    """Return whether acquire.lua granted the whole ttl at once: then its reply is just the fence."""
    return type(reply) is int


def read_acquire(reply: Reply) -> Answer:
    """Decode any other reply of acquire.lua."""
    outcome, fence, left, micros, soon = reply
    return Answer(Outcome(outcome), fence, _left(left), micros / 1e6, bool(soon))


def read_renew(reply: Reply) -> Renewed:
    """Decode a reply of renew.lua."""
    return Renewed(reply[0])


def read_inspect(reply: Reply) -> View:
    """Decode a reply of inspect.lua."""
    holder, left, fence, token, waiting, tickets = reply
    return View(holder, _left(left), None if fence is None else int(fence), token, waiting, tuple(tickets))


def _left(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def ticket_member(inbox: bytes, number: int, claim_ms: int, token: bytes) -> bytes:
    """Return a ticket as it stands in the queue (see parts/lock.lua)."""
    return b"%b|%d|%d|%b" % (inbox, number, claim_ms, token)


def ticket_token(member: bytes) -> bytes:
    """Return whose ticket it is."""
    return member.split(b"|", 3)[3]


@dataclass(frozen=True, slots=True)
class Push:
    """A message in our inbox: a grant (fence > 0), or word that the ticket is next (fence 0)."""

    number: int
    fence: int
    server_time: float  # seconds
    duration: float  # of the grant, or of the present holder's lease; 0 = for ever
    following: int  # the number of our ticket that is next after a grant; 0 = it is not ours, or none


def read_push(payload: bytes) -> Push:
    """Decode a message from settle() in parts/lock.lua."""
    number, fence, micros, ms, *following = payload.split()
    return Push(int(number), int(fence), int(micros) / 1e6, int(ms) / 1000, int(following[0]) if following else 0)


Done = Callable[[Call], None]


class LuaEngine:
    """Builds the calls. Each method sends one script and returns at once; ``done`` gets the answered call.

    ``sent`` is the local time, not later than now; ``expires`` when to stop trying.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._acquire = load("acquire")
        self._release = load("release")
        self._renew = load("renew")
        self._force = load("force")
        self._inspect = load("inspect")

    def acquire(
        self,
        keys: LockKeys,
        token: bytes,
        ttl_ms: int,
        ticket: bytes,
        poll_ms: int,
        reusable: bool,
        sent: float,
        expires: float,
        done: Done,
    ) -> Call:
        """Ask for the lock; with a ``ticket`` (not empty) also for a place in its queue."""
        words = (token, ttl_ms, ticket, poll_ms, b"1" if reusable else b"0")
        call = Call(keys, self._acquire, words, sent, expires, done)
        self.executor.send(call)
        return call

    def release(
        self, keys: LockKeys, token: bytes, ticket: bytes, sent: float, expires: float, done: Done, about: object = None
    ) -> Call:
        """Give up what ``token`` holds and its ``ticket``; either may be empty."""
        # With a ticket it undoes a request; one that may still be under way is to find its token spent.
        pending = b"1" if token and ticket else b"0"
        call = Call(keys, self._release, (token, ticket, pending), sent, expires, done)
        call.about = about
        self.executor.send(call)
        return call

    def renew(self, keys: LockKeys, token: bytes, ttl_ms: int, sent: float, expires: float, done: Done) -> Call:
        """Let the lease of ``token`` end ``ttl_ms`` from now."""
        call = Call(keys, self._renew, (token, ttl_ms), sent, expires, done)
        self.executor.send(call)
        return call

    def force(self, keys: LockKeys, sent: float, expires: float, done: Done) -> Call:
        """Take the lock away from whoever holds it. Not repeated when its answer is lost."""
        call = Call(keys, self._force, (), sent, expires, done)
        call.once = True
        self.executor.send(call)
        return call

    def inspect(self, keys: LockKeys, tickets: int, sent: float, expires: float, done: Done) -> Call:
        """Look at the lock and the first ``tickets`` of its queue."""
        call = Call(keys, self._inspect, (tickets,), sent, expires, done)
        self.executor.send(call)
        return call
