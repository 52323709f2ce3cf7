"""Errors for calls that could not be answered, and for connections that could not be opened."""

from __future__ import annotations

import asyncio

import hiredis
import redis.exceptions

from .._client.error_replies import TRANSIENT, answered, error_code, refusal
from .._client.redis_py import NotAdoptable
from .._core.clock import now
from .._core.display import text
from .._core.keys import NEVER_HELD, Keys, PermitKeys
from ..errors import CommandRefused, CoordinatorClosed, PushUnavailable, SyncError, Unreachable
from .call import Call


def closed(call: Call) -> CoordinatorClosed:
    """Return the error for a call that had no reply when its executor was closed."""
    return CoordinatorClosed.without_reply(text(call.name))


def too_late(call: Call) -> None:
    """Fail a call that was sent to a closed executor, in a later turn of the loop, as a reply would come."""
    asyncio.get_running_loop().call_soon(call.fail, CoordinatorClosed.not_sent(text(call.name)))


def unanswered(
    keys: Keys,
    cause: BaseException | None = None,
    before: SyncError | None = None,
    within: float | None = None,
    script: str = "",
) -> Unreachable:
    """Return the error for a command about ``keys`` whose outcome is not known.

    ``cause`` is the reason why there is no reply, if it is known, ``before`` the error of an earlier attempt, and
    ``within`` the limit in seconds that the caller has set. ``script`` is the name of the script that was sent.
    """
    name = text(keys.name)
    if cause is not None and not isinstance(cause, EXPECTED):
        error = Unreachable.client_raised(name, seconds=within, raised=message_of(cause))
    else:
        code = before.code if isinstance(before, CommandRefused) else ""
        error = Unreachable.unanswered(name, seconds=within, cause=cause, code=code, what=_asked(keys, script))
    error.__cause__ = cause or before
    return error


def _asked(keys: Keys, script: str) -> str:
    """Return what was asked for, as in "the release of"."""
    what = _ASKED.get(script.rpartition("/")[2].removeprefix("narrow_"), "a command for")
    if what == "the acquire of" and isinstance(keys, PermitKeys) and keys.kind in NEVER_HELD:
        return "the wait for"
    return what


_ASKED = {
    "acquire": "the acquire of",
    "acquire_all": "the acquire of",
    "join": "the acquire of",  # a barrier
    "downgrade": "the downgrade of",
    "release": "the release of",
    "renew": "the renewal of",
}
"""What was asked for, by the name of the script."""


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
        within = round(now() - call.begun, 1) or None
        return unanswered(call.keys, cause, error, within=within, script=call.script.name)
    return error


def never_answered(call: Call, server: str, cause: Exception) -> Unreachable:
    """Return the error for a call to a server that has never answered, and refuses connections now."""
    what = _asked(call.keys, call.script.name)
    return Unreachable.never_answered(text(call.name), server=server, cause=cause, what=what)


def not_allowed(message: str, what: str) -> Exception:
    """Return the error to raise for an error reply to ``what`` while a connection was set up."""
    if error_code(message) in TRANSIENT:
        return redis.exceptions.ConnectionError(message)
    return PushUnavailable.not_allowed(what, reply=message)


def refused_for_good(error: Exception) -> SyncError:
    """Return the error for a connection that the server, or the client's configuration, does not allow."""
    if isinstance(error, SyncError):
        return error
    if isinstance(error, NotAdoptable):
        return PushUnavailable.not_with_this_client(str(error))
    return answered(b"", error) or refusal(b"", f"ERR {error}")


REFUSED = (
    PushUnavailable,
    NotAdoptable,
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
