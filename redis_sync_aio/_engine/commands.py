"""The decisions about locks and permits, executed by scripts on the server: calls out, answers decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .._client.resp import Argument, Reply
from .._core.keys import Family, Keys, LockKeys, PermitKeys
from .._scripts import Script, load
from .._scripts.constants import CONTENDED, FREE_MS, POLLERS_TICKET, Outcome, Renewed
from .._transport.call import Call
from .._transport.executor import Executor
from .snapshot import Ticket


class Answer(NamedTuple):
    """A decoded answer of an acquire script, other than a plain grant."""

    outcome: Outcome
    number: int  # QUEUED: 1 if the ticket is new in the queue; OWN: the fence; MISMATCH, TOO_HEAVY: the server's limit
    left: float | None  # seconds until the holder's lease ends; None: never, or nobody holds it
    server_time: float  # seconds
    more: int  # BUSY, QUEUED: a Look; OWN: the permit's weight; MISMATCH: 1 if the limit was set by a resize


@dataclass(frozen=True, slots=True)
class LockView:
    """A decoded answer of lock/inspect.lua."""

    holder: bytes | None
    left: float | None
    fence: int | None
    fence_token: bytes | None
    waiting: int
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit as permits/inspect.lua shows it."""

    token: bytes
    weight: int
    fence: int
    left: float


@dataclass(frozen=True, slots=True)
class PermitsView:
    """A decoded answer of permits/inspect.lua."""

    limit: int
    used: int
    fence: int
    waiting: int
    tickets: tuple[Ticket, ...]
    permits: tuple[Permit, ...]


_OUTCOMES = tuple(Outcome)  # by their numbers, at a fraction of what a call of the class takes


def plain_grant(reply: Reply) -> bool:
    """Return whether an acquire script granted the whole ttl at once: then its reply is just the fence."""
    return type(reply) is int


def read_acquire(reply: Reply) -> Answer:
    """Decode any other reply of an acquire script."""
    outcome, number, left, micros, more = reply
    return Answer(_OUTCOMES[outcome], number, _left(left), micros / 1e6, more)


def left_free(reply: Reply) -> bool:
    """Return whether lock/acquire_all.lua says of a lock that it is free, and was not taken because others are not."""
    return type(reply) is list and reply[0] == Outcome.BUSY and reply[2] == FREE_MS


def read_renew(reply: Reply) -> Renewed:
    """Decode a reply of a renew script."""
    return Renewed(reply[0])


def read_inspect(reply: Reply) -> LockView:
    """Decode a reply of lock/inspect.lua."""
    holder, left, fence, token, waiting, tickets = reply
    waiting -= POLLERS_TICKET in tickets
    shown = _tickets(Ticket.of_lock(ticket) for ticket in tickets if ticket != POLLERS_TICKET)
    return LockView(holder, _left(left), None if fence is None else int(fence), token, waiting, shown)


def read_permits(reply: Reply) -> PermitsView:
    """Decode a reply of permits/inspect.lua."""
    limit, used, fence, waiting, tickets, permits = reply
    shown = tuple(Permit(token, weight, int(own), ms / 1000) for token, weight, own, ms in permits)
    return PermitsView(limit, used, int(fence), waiting, _tickets(map(Ticket.parse, tickets)), shown)


def _tickets(found: Iterable[Ticket | None]) -> tuple[Ticket, ...]:
    return tuple(ticket for ticket in found if ticket is not None)  # what is none is a foreign hand's


def _left(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def ticket_member(inbox: bytes, number: int, claim_ms: int, token: bytes, weight: int = 0) -> bytes:
    """Return a ticket as it stands in the queue: see lock_queue.lua, and with a weight permit_queue.lua."""
    if weight:
        return b"%b|%d|%d|%d|%b" % (inbox, number, claim_ms, weight, token)
    return b"%b|%d|%d|%b" % (inbox, number, claim_ms, token)


FENCES = 10**16
"""More than any fence, or any time in microseconds until the year 2286, and any duration in milliseconds."""
MESSAGE_BYTES = 200
"""More than any message has."""


class Pushed(NamedTuple):
    """A message in our inbox: a grant (fence > 0), ASK_AGAIN, CONTENDED, or word that the ticket is next (fence 0)."""

    number: int
    fence: int
    server_time: float  # seconds
    duration: float  # of the grant, or for how long what the next one waits for is taken; 0 = for ever
    wanted: bool  # somebody waits for what is granted
    following: int  # the number of our ticket that is next after a grant; 0 = it is not ours, or none
    next_duration: float  # for how long what that ticket waits for is taken


def read_push(payload: bytes) -> Pushed:
    """Decode a message from settle() in lock_queue.lua or permit_queue.lua. Raises ValueError for any other."""
    if len(payload) > MESSAGE_BYTES:
        raise ValueError("too long")
    number, fence, micros, ms, *more = map(int, payload.split())
    following = more[0] if more else 0
    then = more[1] if len(more) > 1 else ms
    if not (CONTENDED <= fence < FENCES and 0 <= micros < FENCES and -FENCES < ms < FENCES and -FENCES < then < FENCES):
        raise ValueError("out of range")
    return Pushed(number, fence, micros / 1e6, ms / 1000, bool(more), following, then / 1000)


Done = Callable[[Call], None]


class Scripts:
    """The scripts of one family of names."""

    __slots__ = ("acquire", "inspect", "release", "renew")

    def __init__(self, acquire: str, release: str, renew: str, inspect: str) -> None:
        self.acquire = load(acquire)
        self.release = load(release)
        self.renew = load(renew)
        self.inspect = load(inspect)


class Commands:
    """Builds the calls. Each method sends one script and returns at once; ``done`` gets the answered call.

    ``sent`` is the local time, not later than now; ``expires`` when to stop trying.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._scripts: dict[Family, Scripts] = {
            "lock": Scripts("lock/acquire", "lock/release", "lock/renew", "lock/inspect"),
            "robust": Scripts("lock/acquire", "robust/release", "robust/renew", "lock/inspect"),
            "permits": Scripts("permits/acquire", "permits/release", "permits/renew", "permits/inspect"),
            "upgrade": Scripts("permits/upgrade", "permits/downgrade", "permits/renew", "permits/inspect"),
        }
        self._all = load("lock/acquire_all")
        self._force = load("lock/force_release")
        self._resize = load("permits/resize")
        self._adopt = load("robust/adopt")
        self._record = load("robust/record")
        self._gate = load("fence_gate/accept")

    def _send(
        self, script: Script, keys: Keys, words: tuple[Argument, ...], sent: float, expires: float, done: Done
    ) -> Call:
        call = Call(keys, script, words, sent, expires, done)
        self.executor.send(call)
        return call

    def acquire(
        self,
        keys: Keys,
        token: bytes,
        ttl_ms: int,
        ticket: bytes,
        poll_ms: int,
        more: tuple[Argument, ...],
        sent: float,
        expires: float,
        done: Done,
    ) -> Call:
        """Ask for what ``keys`` stand for; with a ``ticket`` (not empty) also for a place in its queue.

        ``more``: weight, limit and perhaps whose limit for permits, the attempt for upgrades; for locks 1 if the token
        may be used again.
        """
        words: tuple[Argument, ...] = (token, ttl_ms, ticket, poll_ms, *more)
        call = Call(keys, self._scripts[keys.family].acquire, words, sent, expires, done)
        self.executor.send(call)
        return call

    def acquire_all(
        self,
        keys: LockKeys,
        prefix: bytes,
        numbers: Iterable[int],
        ttl_ms: int,
        sent: float,
        expires: float,
        done: Done,
    ) -> Call:
        """Ask for all of `joined_keys` at once, each for the token of ``prefix`` and its number. Does not queue."""
        words = (ttl_ms, prefix, b" ".join(b"%d" % number for number in numbers))
        return self._send(self._all, keys, words, sent, expires, done)

    def release(
        self,
        keys: Keys,
        token: bytes,
        ticket: bytes,
        sent: float,
        expires: float,
        done: Done,
        about: object = None,
        pending: bool = False,
        closing: tuple[Argument, ...] = (),
        undoes: bool = False,
    ) -> Call:
        """Give up what ``token`` holds and its ``ticket``; either may be empty.

        ``pending``: a copy of the acquire that this ends may still be under way, and is to find its token spent.
        ``closing``: who wrote the record of a robust lock, and what is to become of it; empty: it was not adopted. Of
        an upgrade: the attempt. ``undoes``: as `Call.undoes`; also what is ``pending`` or has a ticket.
        """
        words: tuple[Argument, ...] = (token, ticket, b"1" if pending else b"0")
        if closing or keys.closing:
            words += closing or keys.closing
        call = Call(keys, self._scripts[keys.family].release, words, sent, expires, done)
        call.about = about
        call.undoes = pending or undoes or ticket != b""
        self.executor.send(call)
        return call

    def renew(
        self,
        keys: Keys,
        token: bytes,
        ttl_ms: int,
        sent: float,
        expires: float,
        done: Done,
        more: tuple[Argument, ...] = (),
        weight: int = 1,
    ) -> Call:
        """Let the lease of ``token`` end ``ttl_ms`` from now; ``more``: how many fences a process that shares needs.

        ``weight``: of a permit; one that weighs less is not the one that is meant.
        """
        size: tuple[Argument, ...] = (weight,) if isinstance(keys, PermitKeys) else ()
        return self._send(self._scripts[keys.family].renew, keys, (token, ttl_ms, *size, *more), sent, expires, done)

    def adopt(
        self, keys: Keys, token: bytes, words: tuple[Argument, ...], sent: float, expires: float, done: Done
    ) -> Call:
        """Look what the last holder of a robust lock left behind, and put the record of ``token`` in its place.

        ``words`` as in robust/adopt.lua, from the fence on.
        """
        return self._send(self._adopt, keys, (token, *words), sent, expires, done)

    def record(
        self, keys: Keys, token: bytes, words: tuple[Argument, ...], sent: float, expires: float, done: Done
    ) -> Call:
        """Record how far the work of ``token`` has come; ``words`` as in robust/record.lua, from the fence on."""
        return self._send(self._record, keys, (token, *words), sent, expires, done)

    def gate(self, keys: Keys, fence: bytes, ttl_ms: int, sent: float, expires: float, done: Done) -> Call:
        """Accept a fence, unless a higher one was accepted before; look, if it is empty."""
        return self._send(self._gate, keys, (fence, ttl_ms), sent, expires, done)

    def force(self, keys: Keys, sent: float, expires: float, done: Done) -> Call:
        """Take the lock away from whoever holds it. Not repeated when its answer is lost."""
        call = Call(keys, self._force, (), sent, expires, done)
        call.once = True
        self.executor.send(call)
        return call

    def inspect(self, keys: Keys, shown: int, sent: float, expires: float, done: Done) -> Call:
        """Look, and see the first ``shown`` of each list."""
        return self._send(self._scripts[keys.family].inspect, keys, (shown,), sent, expires, done)

    def resize(self, keys: Keys, limit: int, sent: float, expires: float, done: Done) -> Call:
        """Set the limit of permits."""
        return self._send(self._resize, keys, (limit,), sent, expires, done)


Send: TypeAlias = Callable[[Commands, float, float, Done], Call]
"""Sends one command: (engine, sent, expires, done)."""
