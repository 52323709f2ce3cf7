"""One command on its way to the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from .._client.resp import Reply, Words
from .._client.retry import MIN_ATTEMPT
from .._core import logs
from .._core.display import text
from .._core.keys import Keys
from .._scripts import Script
from ..errors import SyncError

T = TypeVar("T")


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
    over: bool = False
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
        self.keys: Keys = keys
        self.script: Script = script
        self.arguments = arguments
        self.begun: float = sent
        self.sent: float = sent  # local clock; from before the last copy was sent (P6)
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
