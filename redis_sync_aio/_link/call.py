"""One command on its way to the server, and what the server's error answers mean."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from .._keys import Keys
from .._scripts import Script
from .._types import text
from ..errors import CommandRefused, OutOfMemory, PermissionRefused, SyncError, Unreachable, WrongKeyType

logger = logging.getLogger("redis_sync_aio")

Reply: TypeAlias = Any
"""What hiredis made of the server's answer: int, bytes, None, list, dict …; decoded by the engine."""

Argument: TypeAlias = bytes | int
Words: TypeAlias = tuple[Argument, ...]

Talk: TypeAlias = Generator[list[Words], list[Reply], Reply]
"""A conversation under WATCH: yields commands that leave in one write, is sent their replies, error answers as
`ReplyError` among them; returns the outcome. While it lasts no other talk may begin on the same connection."""


class Here(NamedTuple):
    """Our own inbox, if we have one, and what takes the messages that a talk has for it."""

    inbox: bytes
    deliver: Callable[[bytes], object]


MOMENT = 0.05
"""So many seconds an attempt has at least, even if the time of its call is up: cut short, nobody knows what it did."""

NOWHERE = Here(b"", id)
"""No inbox is called so."""


class _Conflict(Enum):
    CONFLICT = "conflict"


CONFLICT: Final = _Conflict.CONFLICT
"""What a talk returns when a watched key was changed: nothing was executed."""


class ReplyError(Exception):
    """An error answer of the server, verbatim."""


class Call:
    """A command, sent until it is answered or until ``expires``; then ``done(call)`` runs, exactly once.

    Every command of this package but ``force`` is idempotent for its token, so a call whose connection was lost is
    sent again as it is. ``ambiguous`` says that an earlier copy may have been executed.

    Invariant: ``over`` is set before ``done`` is called; after that the call is never sent or done again.
    """

    # Most calls never change these; as class attributes they cost nothing to set up.
    reply: Reply = None
    error: SyncError | None = None
    trouble: SyncError | None = None
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
        self.sent = sent  # local clock, from before the last copy was sent (P6)
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

    def had_its_time(self, time: float) -> bool:
        """Return whether the answer to what was sent is not worth waiting for any more."""
        return time >= max(self.expires, self.sent + MOMENT)

    def answer(self, reply: Reply) -> None:
        """Finish with the server's answer."""
        if not self.over:
            self.over = True
            self.reply = reply
            self.done(self)

    def fail(self, error: SyncError) -> None:
        """Finish without an answer."""
        if not self.over:
            self.over = True
            self.error = error
            self.done(self)

    def drop(self) -> None:
        """Nobody wants the answer any more: never send it again, and stay silent when it arrives."""
        self.over = True


class Executor(Protocol):
    """What carries calls to the server. Calls that share a name are executed in the order of ``send``."""

    pushes: bool
    """Whether grants are pushed; if not, waiters poll."""
    alone: bool
    """Whether no command can be left on a connection other than the present one."""

    def send(self, call: Call) -> None:
        """Send ``call``. Returns at once, never raises; ``call.done`` runs later, never inside."""

    def abandon(self) -> None:
        """In a forked child: never use or close what belongs to the parent."""

    def bury(self) -> None:
        """The event loop was closed, so nothing runs any more: end the connection without it."""

    async def close(self) -> None:
        """Fail whatever is under way and close connections and tasks."""


class LinkOwner(Protocol):
    """What the link tells its coordinator. All of it is called from the event loop, none of it raises."""

    def link_pushed(self, payload: bytes) -> None: ...
    def link_up(self) -> None: ...
    def link_refused(self, error: SyncError) -> None: ...
    async def link_closing(self) -> None: ...
    def link_client_closed(self) -> None: ...
    def link_needed(self) -> bool: ...


# Answers that say "not now": nothing was executed, so the call is simply sent again after a while.
TRANSIENT = frozenset({"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MISCONF", "NOREPLICAS"})

CLOSED = "closed before the answer about {!r} arrived: it may have happened, or not; create a new Coordinator and look"

_REFUSALS: dict[str, tuple[type[CommandRefused], str]] = {
    "OOM": (OutOfMemory, "free memory or raise maxmemory"),
    "NOPERM": (PermissionRefused, "extend the ACL rule of this user; docs/servers.md has the least one"),
    "NOAUTH": (PermissionRefused, "give the client a username and password"),
    "WRONGPASS": (PermissionRefused, "check the username and password of the client"),
    "WRONGTYPE": (WrongKeyType, "choose another name, or delete what is there"),
}
# Redis 6.2 wraps the error of a command that a script ran, or that it returns after a pcall; later versions put its
# code first. redis-py takes the leading ERR away.
_WRAPPED = re.compile(r"^(?:ERR )?(?:Error running script.*?|@user_script: ?\d+): -?([A-Z]{3,}) (.*)$", re.DOTALL)


# What EXEC says on behalf of a command that was refused when it was queued, or of the server's state.
_DISCARDED = re.compile(r"^(?:EXECABORT )?Transaction discarded because of: -?(.*)$", re.DOTALL)


# A command that the user may not run, called by a script that he may: Valkey and Redis 7; Redis 6.2.
_NOT_IN_A_SCRIPT = re.compile(r"ACL failure in script|The user executing the script can't")


_NO_SCRIPTS = re.compile(r"run the 'evalsha?'|unknown command ['`]?evalsha?\b", re.IGNORECASE)


def scripts_refused(message: str) -> bool:
    """Return whether an error answer says that scripts are not for this user, or not for this server."""
    return _NO_SCRIPTS.search(message) is not None


def error_code(message: str) -> str:
    """Return the code of an error answer, its first word; of one that EXEC passes on, that one's."""
    message = _passed_on(message)
    if _NOT_IN_A_SCRIPT.search(message):
        return "NOPERM"
    wrapped = _WRAPPED.match(message)
    return wrapped[1] if wrapped else message.split(" ", 1)[0]


def _passed_on(message: str) -> str:
    discarded = _DISCARDED.match(message)
    return discarded[1] if discarded else message


def passing(error: SyncError) -> bool:
    """Return whether the trouble may be over in a while; what was tried did nothing."""
    return isinstance(error, Unreachable) or (isinstance(error, CommandRefused) and error.code in TRANSIENT)


def warn_of_watch(message: str) -> None:
    """Log that scripts were refused; the caller does so once."""
    logger.warning('redis_sync_aio uses WATCH instead of scripts (engine="watch" silences this): %s', message)


def refusal(
    name: bytes, message: str, no_scripts: str = "", keys: tuple[bytes, ...] = (), again: bool = False
) -> CommandRefused:
    """Return the typed error for an error answer about the lock ``name``; empty: it was to the connection itself.

    ``no_scripts``: how those were refused. ``keys``: those of the lock. ``again``: the answer to an earlier copy of the
    command was lost.
    """
    message = _passed_on(message)
    code = error_code(message)
    if no_scripts and code == "NOPERM":
        message += f"; and before that, of scripts: {no_scripts}"
    if code == "WRONGTYPE" and keys:
        message += f": one of {', '.join(map(text, keys))} is somebody else's"
    kind, advice = _REFUSALS.get(code, (CommandRefused, "" if again else "nothing was changed"))
    if code == "ERR" and scripts_refused(message):
        advice = 'the server has no scripts: use engine="auto" or "watch"; robust locks and fence gates need them'
    if again:
        advice += ("; " if advice else "") + "an earlier copy, of which the answer was lost, may have been executed"
    what = f"a command for {text(name)!r}" if name else "the connection"
    return kind(f"the server refused {what}: {message} ({advice})", code=code)
