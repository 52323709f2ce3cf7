"""Calls: commands on their way to a server, those deferred after a refusal, and errors for those without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import hiredis
import redis.exceptions

from .._client.replies import TRANSIENT, Reply, Words, answered, error_code, refusal
from .._client.settings import MIN_ATTEMPT
from .._core import logs
from .._core.backoff import Backoff
from .._core.clock import now
from .._core.display import text
from .._core.keys import Keys
from .._scripts import Script
from ..errors import CommandRefused, CoordinatorClosed, PushUnavailable, SyncError, Unreachable
from ..errors._base import copy_error, within

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
    """True if it was sent again without its script, which another call had brought."""
    at_most_once = False
    """True if it is not idempotent, and so never sent a second time."""
    undoes = False
    """True if it undoes an earlier command. Later commands must not overtake it, so its script is sent in full."""
    context: Any = None
    """Context for the reader of the reply."""

    # Given to it by the one that sends it: see `Commands`.
    keys: Keys
    script: Script
    arguments: Words

    def __init__(self, sent: float, expires: float, done: Callable[[Call], None]) -> None:
        self.begun: float = sent
        self.sent: float = sent  # local clock; from before the latest copy was sent (P6)
        self.expires = expires  # local clock; the end of all attempts
        self.done = done

    def of(self, keys: Keys, script: Script, arguments: Words = ()) -> Self:
        """Turn the object into a call of ``script`` on ``keys``; return it."""
        self.keys, self.script, self.arguments = keys, script, arguments
        return self

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
        part = Call(self.sent, self.expires, done).of(self.keys, self.script)
        part.attempts, part.ambiguous = self.attempts, self.ambiguous
        if self.error is None:
            part.answer(reply)
        else:
            part.fail(self.error)

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
            logs.log("outcome_not_taken", raised=failure, lock=text(self.name))
            logs.raise_later(failure)

    def forget(self) -> None:
        """Finish without calling ``done``: never send the command again, and ignore its reply."""
        self.over = True


def not_understood(name: bytes, error: BaseException) -> SyncError:
    """Log that reading a reply about ``name`` raised ``error``, and return the error to raise."""
    logs.log("useless_answer", raised=error, lock=text(name))
    found = SyncError(
        f"Redis answered a command for {text(name)!r}, and the reply could not be used: {type(error).__name__}: "
        f"{error}. The command may have been executed. If another program has changed the keys of that name, "
        "delete them; otherwise this is a defect of redis_sync_aio: please report it with the traceback that was logged"
    )
    found.__cause__ = error
    return found


def understood(read: Callable[[Reply], T], name: bytes, reply: Reply) -> T:
    """Return ``read(reply)`` for a reply about ``name``; raise SyncError if the reply cannot be used."""
    try:
        return read(reply)
    except (ValueError, TypeError) as error:
        raise not_understood(name, error) from error


# -- Errors for calls that could not be answered, and for connections that could not be opened -----------------


def closed(call: Call) -> CoordinatorClosed:
    """Return the error for a call that had no reply when its link was closed."""
    return CoordinatorClosed(
        f"the coordinator was closed before a reply about {text(call.name)!r} arrived: the command may have been "
        "executed or not; check with a new Coordinator"
    )


def too_late(call: Call) -> None:
    """Fail a call that was sent to a closed link, in a later turn of the loop, as a reply would come."""
    error = CoordinatorClosed(
        f"no command was sent for {text(call.name)!r}: its coordinator is closed. Leases that it still holds end with "
        "their ttl; create a new Coordinator"
    )
    asyncio.get_running_loop().call_soon(call.fail, error)


def unanswered(
    keys: Keys,
    cause: BaseException | None = None,
    before: SyncError | None = None,
    seconds: float | None = None,
    script: str = "",
) -> Unreachable:
    """Return the error for a command about ``keys`` whose outcome is not known.

    ``cause`` is the reason why there is no reply, if it is known, ``before`` the error of an earlier attempt, and
    ``seconds`` the limit that the caller has set. ``script`` is the name of the script that was sent.
    """
    name, limit = text(keys.name), "in time" if seconds is None else within(seconds)
    if cause is not None and not isinstance(cause, EXPECTED):
        error = Unreachable(
            f"a command for {name!r} got no answer {limit}: the client raised {message_of(cause)}. That is neither a "
            "reply of Redis nor a failure of the network; check the code that the client calls while it connects, such "
            "as a credential provider"
        )
    else:
        error = Unreachable(
            f"Redis did not answer {_asked(keys, script)} {name!r} {limit}"
            + (f": {type(cause).__name__}" if cause else "")
            + (f": {str(cause).rstrip('.')}" if cause and str(cause) else "")
            + (f"; before that it answered {before.code}" if isinstance(before, CommandRefused) else "")
            + "; check the server and the network, or allow more time (retry_for, timeout)"
        )
    error.__cause__ = cause or before
    return error


def _asked(keys: Keys, script: str) -> str:
    """Return the purpose of the call, as in "the release of"."""
    if script == keys.kind.acquire:
        return "the wait for" if keys.kind.closed else "the acquire of"
    return _ASKED.get(script.rpartition("/")[2], "a command for")


_ASKED = {
    "acquire_all": "the acquire of",
    "downgrade": "the downgrade of",
    "release": "the release of",
    "renew": "the renewal of",
}
"""Purpose of the call, by the name of the script."""


def message_of(error: BaseException) -> str:
    """Return the message of ``error``, with its type if the message alone may be unclear."""
    return str(error) if isinstance(error, (SyncError, *EXPECTED)) else f"{type(error).__name__}: {error}".rstrip(": .")


def not_from_outside(error: Exception | asyncio.CancelledError, closed: bool) -> Exception:
    """Return the reason why an attempt to connect failed; raise ``error`` if it is a cancellation from outside.

    ``closed`` says that the link is closed, so the cancellation may be its own.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # if this is another error, redis-py has swallowed the cancellation
        raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
    if not isinstance(error, asyncio.CancelledError):
        return error
    if closed:
        raise error
    found = RuntimeError("CancelledError, although the attempt to connect was not cancelled")
    found.__cause__ = error
    return found


def time_is_up(call: Call, cause: BaseException | None = None) -> SyncError:
    """Return the error for a call whose time is up: the reason for its failures, or that its outcome is unknown."""
    error = call.connection_error
    if error is None or (call.ambiguous and isinstance(error, CommandRefused)):
        waited = round(now() - call.begun, 1) or None
        return unanswered(call.keys, cause, error, seconds=waited, script=call.script.name)
    return error


def never_answered(call: Call, server: str, cause: Exception) -> Unreachable:
    """Return the error for a call to a server that has never answered, and refuses connections now."""
    what = _asked(call.keys, call.script.name)
    return Unreachable(
        f"no Redis has answered at {server} yet, so {what} {text(call.name)!r} was given up: {type(cause).__name__}: "
        f"{str(cause).rstrip('.')}; check the address, and start the server first"
    )


def not_allowed(message: str, what: str) -> Exception:
    """Return the error to raise for an error reply to ``what`` while a connection was set up."""
    if error_code(message) in TRANSIENT:
        return redis.exceptions.ConnectionError(message)
    return PushUnavailable(
        f"the server does not allow {what}, which pushed wake-ups need: {message}; allow it, or use "
        'Coordinator(client, push="never") to poll instead'
    )


def refused_for_good(error: Exception) -> SyncError:
    """Return the error for a connection that the server, or the client's configuration, does not allow."""
    if isinstance(error, SyncError):
        return error
    return answered(b"", error) or refusal(b"", f"ERR {error}")


REFUSED = (
    PushUnavailable,
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.ResponseError,
    redis.exceptions.DataError,
)
"""Errors that mean that connecting will never succeed."""
MAYBE_LATER = (
    Unreachable,
    redis.exceptions.RedisError,
    OSError,
    TimeoutError,
    CommandRefused,
    hiredis.HiredisError,
)
"""Errors of the server or the network that may end."""
EXPECTED = (*REFUSED, *MAYBE_LATER)
"""All other errors come from the caller's client, such as from its credential provider. They may end, too."""


# -- Calls deferred after a temporary refusal, and later calls for the same name kept behind them --------------


AFTER_REFUSAL = Backoff(initial=0.01, cap=0.25)


class Deferred:
    """The deferred calls about one name."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.refused: list[Call] = []
        self.behind: list[Call] = []

    def calls(self) -> list[Call]:
        """Return all calls in the order in which they were sent."""
        return [*self.refused, *self.behind]


class DeferredCalls:
    """Sends refused calls again after a pause (``send``), and then the calls kept behind them (``send_behind``)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[Call], None], send_behind: Callable[[Call], None]
    ) -> None:
        self._loop = loop
        self._send = send
        self._send_behind = send_behind
        self.delayed: dict[bytes, Deferred] = {}  # by name

    def keep_behind(self, call: Call) -> bool:
        """Keep a new call if an earlier call about its name is deferred; return whether so."""
        found = self.delayed.get(call.name)
        if found is None:
            return False
        if found.refused and (error := found.refused[0].connection_error) is not None:
            call.delayed_by(copy_error(error))
        found.behind.append(call)
        return True

    def join(self, call: Call) -> bool:
        """Keep a call that lost its connection if an earlier call about its name is deferred; return whether so."""
        found = self.delayed.get(call.name)
        if found is not None:
            found.refused.append(call)
        return found is not None

    def add(self, call: Call) -> None:
        """Send a refused call again after a pause."""
        self._of_name(call).refused.append(call)

    def hold(self, call: Call) -> None:
        """Send a new call after a pause, behind calls about its name that are refused until then."""
        self._of_name(call).behind.append(call)

    def _of_name(self, call: Call) -> Deferred:
        found = self.delayed.get(call.name)
        if found is None:
            delay = AFTER_REFUSAL.bound(call.attempts) * (0.5 + AFTER_REFUSAL.random() / 2)
            found = self.delayed[call.name] = Deferred(self._loop.call_later(delay, self._send_deferred, call.name))
        return found

    def _send_deferred(self, name: bytes) -> None:
        found = self.delayed.pop(name)
        for calls, send in ((found.refused, self._send), (found.behind, self._send_behind)):
            for call in calls:
                if not call.over:
                    call.sent = now()
                    send(call)

    def calls(self) -> Iterator[Call]:
        """Return all deferred calls."""
        for found in self.delayed.values():
            yield from found.calls()

    def take(self) -> list[Call]:
        """Remove and return all deferred calls."""
        calls = list(self.calls())
        for found in self.delayed.values():
            found.timer.cancel()
        self.delayed.clear()
        return calls
