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
from ..errors import CommandRefused, SyncError

T = TypeVar("T")


class Call:
    """A command, sent until it is answered or until ``expires``; then ``done(call)`` runs, exactly once.

    Every command of this package but ``force`` is idempotent for its token, so a call whose connection was lost is
    sent again as it is. ``ambiguous`` says that an earlier copy may have been executed.

    When ``done`` raises, it is called once more, with an error in place of the reply. So the error reaches the task
    that waits for the call, and nothing else: ``answer`` and ``fail`` never raise.

    Invariant: ``over`` is set before ``done`` is called; after that the call is never sent, answered or failed again.
    """

    # Most calls never change these. As class attributes they cost nothing to set up.
    reply: Reply = None
    error: SyncError | None = None
    connection_error: SyncError | None = None
    """The reason that the latest attempt got no answer, or that no attempt is made yet."""
    refused: Callable[[Call, CommandRefused], None] | None = None
    """Called with each refusal after which it is sent later, or sent again."""
    attempts = 0
    ambiguous = False
    over: bool = False
    relied = False
    """Whether it was sent again without its script, which another call had brought."""
    at_most_once = False
    """Whether it is not idempotent, and so never sent a second time."""
    undoes = False
    """Whether it undoes an earlier command. Later commands must not overtake it, so its script is sent in full."""
    context: Any = None
    """Context for the reader of the reply."""
    _whole: tuple[Keys, Script] | None = None
    """Its full keys and script, while it is sent with fewer keys."""

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
        self.sent: float = sent  # local clock; from before the latest copy was sent (P6)
        self.expires = expires  # local clock; the end of all attempts
        self.done = done

    @property
    def name(self) -> bytes:
        """The name that the command is about."""
        return self.keys.name

    def command(self, with_source: bool = False) -> Words:
        """Return the words of the command; ``with_source`` for a server that may not know the script yet."""
        keys, script = self.keys.all, self.script
        if with_source:
            return (b"EVAL", script.source, len(keys), *keys, *self.arguments)
        return (b"EVALSHA", script.sha, len(keys), *keys, *self.arguments)

    def settle_part(self, reply: Reply, done: Callable[[Call], None]) -> None:
        """Call ``done`` with a part of this call, which has ended: that part has ``reply``, or the same error."""
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
        """Use fewer keys from now on, and return True; where the script cannot, use all keys and return False."""
        narrow = self.script.narrow
        if narrow is None:
            self.widen()
            return False
        self._whole = self._whole or (self.keys, self.script)
        self.keys = replace(self.keys, all=tuple(self.keys.all[number] for number in narrow.keys), heads={})
        self.script = narrow.script
        return True

    def widen(self) -> None:
        """Use all keys again."""
        if self._whole is not None:
            (self.keys, self.script), self._whole = self._whole, None

    def delayed_by(self, error: SyncError) -> None:
        """Note why it is sent later, or sent again."""
        self.connection_error = error
        if self.refused is not None and isinstance(error, CommandRefused):
            self.refused(self, error)

    def timed_out(self, time: float) -> bool:
        """Return whether the reply to the latest copy is no longer worth waiting for."""
        return time >= max(self.expires, self.sent + MIN_ATTEMPT)

    def answer(self, reply: Reply) -> None:
        """Finish with the server's reply."""
        if not self.over:
            self.over = True
            self.reply = reply
            try:
                self.done(self)
            except BaseException as error:
                self._end_by(not_understood(self.name, error))
                logs.raise_later(error)

    def fail(self, error: SyncError) -> None:
        """Finish with an error."""
        if not self.over:
            self.over = True
            self._end_by(error)

    def _end_by(self, error: SyncError) -> None:
        self.reply, self.error = None, error
        try:
            self.done(self)
        except BaseException as failure:
            logs.outcome_not_taken(text(self.name))
            logs.raise_later(failure)

    def forget(self) -> None:
        """Finish without calling ``done``: never send the command again, and ignore its reply."""
        self.over = True


def not_understood(name: bytes, error: BaseException) -> SyncError:
    """Log that reading a reply about ``name`` raised ``error``, and return the error to raise."""
    logs.useless_answer(text(name), error)
    found = SyncError.useless_reply(text(name), error)
    found.__cause__ = error
    return found


def understood(read: Callable[[Reply], T], name: bytes, reply: Reply) -> T:
    """Return ``read(reply)`` for a reply about ``name``; raise SyncError if the reply cannot be used."""
    try:
        return read(reply)
    except (ValueError, TypeError) as error:
        raise not_understood(name, error) from error
