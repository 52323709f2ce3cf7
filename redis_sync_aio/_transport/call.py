"""One command on its way to the server, and what carries it there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from .._core import logs
from .._core.backoff import Backoff
from .._core.display import text
from .._core.keys import Endpoint, Keys
from .._scripts import Script
from ..errors import SyncError

T = TypeVar("T")

Reply: TypeAlias = Any
"""What hiredis made of the server's answer: int, bytes, None, list, dict …; decoded by the engine."""

Argument: TypeAlias = bytes | int
Words: TypeAlias = tuple[Argument, ...]

Dialogue: TypeAlias = Generator[list[Words], list[Reply], Reply]
"""A conversation under WATCH: yields commands that leave in one write, is sent their replies, error answers as
`ReplyError` among them; returns the outcome. While it lasts no other talk may begin on the same connection."""


class LocalInbox(NamedTuple):
    """Our own inbox, if we have one, and what takes the messages that a talk has for it."""

    inbox: bytes
    deliver: Callable[[bytes], object]


class LinkOptions(NamedTuple):
    """How a link is to behave."""

    response_timeout: float  # seconds; an answer that takes longer means that the connection is dead
    connect_timeout: float  # seconds
    converse: Callable[[Call, LocalInbox], Dialogue]
    """Returns one attempt at a call where scripts are not allowed."""


RETRY_FOR = 10.0
"""Seconds for which a command is repeated while Redis is out of reach, unless the caller says otherwise."""
RETRY = Backoff(initial=0.01, cap=0.5)
"""The pauses between those, where there is no link that connects again."""
MIN_ATTEMPT = 0.05
"""So many seconds an attempt has at least, even if the time of its call is up: cut short, nobody knows what it did."""

NOWHERE = LocalInbox(b"", id)
"""No inbox is called so."""


class _Conflict(Enum):
    CONFLICT = "conflict"


CONFLICT: Final = _Conflict.CONFLICT
"""What a talk returns when a watched key was changed: nothing was executed."""


ANSWERING = 0.25
"""Seconds since a server was last heard within which it counts as one that answers."""


class ReplyError(Exception):
    """An error answer of the server, verbatim."""


class Call:
    """A command, sent until it is answered or until ``expires``; then ``done(call)`` runs, exactly once.

    Every command of this package but ``force`` is idempotent for its token, so a call whose connection was lost is
    sent again as it is. ``ambiguous`` says that an earlier copy may have been executed.

    When ``done`` raises, it is called once more, with an error in place of the answer: whoever waits for the call has
    to hear of it, and nobody else. So ``answer`` and ``fail`` never raise.

    Invariant: ``over`` is set before ``done`` is called; after that the call is never sent, answered or failed again.
    """

    # Most calls never change these; as class attributes they cost nothing to set up.
    reply: Reply = None
    error: SyncError | None = None
    connection_error: SyncError | None = None
    """Why it has not been answered yet."""
    attempts = 0
    ambiguous = False
    over = False
    once = False
    """Not idempotent: never sent a second time."""
    undoes = False
    """Nothing that is sent later may come before it: not because its script is not known to the server yet, either."""
    about: Any = None
    """For whoever reads the answer."""
    _whole: tuple[Keys, Script] | None = None
    """Its keys and script, while it is sent with fewer keys."""

    def __init__(
        self,
        keys: Keys,
        script: Script,
        arguments: Words,
        sent: float,
        expires: float,
        done: Callable[[Call], None],
    ) -> None:
        self.keys = keys
        self.script = script
        self.arguments = arguments
        self.begun = self.sent = sent  # local clock; `sent`: from before the last copy was sent (P6)
        self.expires = expires  # local clock: stop trying then
        self.done = done

    @property
    def name(self) -> bytes:
        """The name it is about."""
        return self.keys.name

    def command(self, with_source: bool = False) -> Words:
        """Return the words of the command. A server that does not know the script yet needs its source."""
        keys, script = self.keys.all, self.script
        if with_source:
            return (b"EVAL", script.source, len(keys), *keys, *self.arguments)
        return (b"EVALSHA", script.sha, len(keys), *keys, *self.arguments)

    def deal(self, reply: Reply, done: Callable[[Call], None]) -> None:
        """Let ``done`` have a part of this call, which has ended: that part of the answer, or the same error."""
        part = Call(self.keys, self.script, (), self.sent, self.expires, done)
        part.attempts, part.ambiguous = self.attempts, self.ambiguous
        if self.error is None:
            part.answer(reply)
        else:
            part.fail(self.error)

    @property
    def narrowed(self) -> bool:
        """Whether it is sent with fewer keys than it has."""
        return self._whole is not None

    def narrow(self) -> bool:
        """Do the same with fewer keys from now on, and return True. Where that is not possible be whole again."""
        narrow = self.script.narrow
        if narrow is None:
            self.widen()
            return False
        self._whole = self._whole or (self.keys, self.script)
        self.keys = replace(self.keys, all=tuple(self.keys.all[number] for number in narrow.keys), heads={})
        self.script = narrow.script
        return True

    def widen(self) -> None:
        """Be sent with all keys again."""
        if self._whole is not None:
            (self.keys, self.script), self._whole = self._whole, None

    def had_its_time(self, time: float) -> bool:
        """Return whether the answer to what was sent is not worth waiting for any more."""
        return time >= max(self.expires, self.sent + MIN_ATTEMPT)

    def answer(self, reply: Reply) -> None:
        """Finish with the server's answer."""
        if not self.over:
            self.over = True
            self.reply = reply
            try:
                self.done(self)
            except Exception as error:
                self._end_by(not_understood(self.name, error))

    def fail(self, error: SyncError) -> None:
        """Finish without an answer."""
        if not self.over:
            self.over = True
            self._end_by(error)

    def _end_by(self, error: SyncError) -> None:
        self.reply, self.error = None, error
        try:
            self.done(self)
        except Exception:
            logs.outcome_not_taken(text(self.name))

    def drop(self) -> None:
        """Nobody wants the answer any more: never send it again, and stay silent when it arrives."""
        self.over = True


def not_understood(name: bytes, error: Exception) -> SyncError:
    """Return the error for an answer about ``name`` that raised ``error`` where it was taken; log it."""
    logs.useless_answer(text(name), error)
    found = SyncError(
        f"Redis answered a command for {text(name)!r}, and the answer could not be used: {type(error).__name__}: "
        f"{error}. The command may have been executed. If another program has changed the keys of that name, delete "
        "them; else it is a defect of redis_sync_aio: please report it with the traceback that was logged"
    )
    found.__cause__ = error
    return found


def understood(read: Callable[[Reply], T], name: bytes, reply: Reply) -> T:
    """Return what ``read`` makes of an answer about ``name``; raises SyncError if it cannot be used."""
    try:
        return read(reply)
    except (ValueError, TypeError) as error:
        raise not_understood(name, error) from error


class Executor(Protocol):
    """What carries calls to the server. Calls that share a name are executed in the order of ``send``."""

    pushes: bool
    """Whether grants are pushed; if not, waiters poll."""

    @property
    def alone(self) -> bool:
        """Whether no command can be left on a connection other than the present one."""
        ...

    @property
    def connections(self) -> int:
        """How many connections of its own were opened so far."""
        ...

    @property
    def connection_error(self) -> Exception | None:
        """Why there is no connection at the moment, if there is none and that is known."""
        ...

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return the same, of the server that has ``keys``."""
        ...

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` is known to answer. ``stalled``: nobody listened lately."""
        ...

    def known_as(self, keys: Keys) -> Endpoint:
        """Return what the server that has ``keys`` knows us as."""
        ...

    def send(self, call: Call) -> None:
        """Send ``call``. Returns at once, never raises; ``call.done`` runs later, never inside."""

    def after_fork(self) -> None:
        """In a forked child: never use or close what belongs to the parent."""

    def close_without_loop(self) -> None:
        """The event loop was closed, so nothing runs any more: end the connection without it."""

    async def close(self) -> None:
        """Fail whatever is under way and close connections and tasks."""


class LinkOwner(Protocol):
    """What the link tells its coordinator. All of it is called from the event loop, none of it raises."""

    def link_pushed(self, payload: bytes) -> None: ...
    def link_up(self, concerns: Callable[[Keys], bool]) -> None: ...
    def link_moved(self) -> None: ...
    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None: ...
    async def link_closing(self) -> None: ...
    def link_client_closed(self) -> None: ...
    def link_needed(self, concerns: Callable[[Keys], bool]) -> bool: ...
