"""What can go wrong with a link, and the errors that say so."""

from __future__ import annotations

import asyncio

import hiredis
import redis.exceptions

from .._client.error_replies import TRANSIENT, answered, error_code, refusal
from .._client.redis_py import NotAdoptable
from .._core.clock import now
from .._core.display import shown_within, text
from ..errors import CommandRefused, CoordinatorClosed, PushUnavailable, SyncError, Unreachable
from .call import Call


def closed(call: Call) -> CoordinatorClosed:
    """A call without an answer when its executor was closed."""
    return CoordinatorClosed(
        f"closed before the answer about {text(call.name)!r} arrived: it may have happened, or not; create a new "
        "Coordinator and look"
    )


def too_late(call: Call) -> None:
    """Fail a call that was sent to an executor that is closed: in a turn of its own, as an answer would come."""
    error = CoordinatorClosed(
        f"{text(call.name)!r} was not asked for anything: its coordinator is closed. What it holds ends with its ttl; "
        "create a new Coordinator"
    )
    asyncio.get_running_loop().call_soon(call.fail, error)


def perhaps(call: Call) -> Unreachable:
    """A call that is not repeated lost its answer."""
    return Unreachable(
        f"the connection was lost before the answer about {text(call.name)!r} arrived: it may or may not have "
        "happened; look at statistics()"
    )


def unanswered(
    name: bytes, cause: BaseException | None = None, before: SyncError | None = None, within: float | None = None
) -> Unreachable:
    """Return the error for a command about ``name`` of which nobody knows what became of it.

    ``cause`` is why there is no answer, if that is known; ``before`` the trouble of an earlier attempt; ``within`` so
    many seconds, by the caller's wish.
    """
    if cause is not None and not isinstance(cause, EXPECTED):
        return _client_raised(name, cause, within)
    error = Unreachable(
        f"Redis did not answer a command for {text(name)!r} {'in time' if within is None else shown_within(within)}"
        + (f": {type(cause).__name__}" if cause else "")
        + (f": {str(cause).rstrip('.')}" if cause and str(cause) else "")
        + (f"; before that it answered {before.code}" if isinstance(before, CommandRefused) else "")
        + "; check the server and the network, or allow more time (retry_for, timeout)"
    )
    error.__cause__ = cause or before
    return error


def said(error: BaseException) -> str:
    """Return what ``error`` says, with its type where the words alone would say little."""
    return str(error) if isinstance(error, (SyncError, *EXPECTED)) else f"{type(error).__name__}: {error}".rstrip(": .")


def _client_raised(name: bytes, cause: BaseException, within: float | None) -> Unreachable:
    """Return the error for a command without an answer whose ``cause`` is neither the server's nor the network's."""
    error = Unreachable(
        f"a command for {text(name)!r} got no answer {'in time' if within is None else shown_within(within)}: the "
        f"client raised {said(cause)}. That is neither an answer of Redis nor a failure of the network; look at what "
        "the client calls while it connects (a credential provider, say)"
    )
    error.__cause__ = cause
    return error


def not_from_outside(error: Exception | asyncio.CancelledError, closed: bool) -> Exception:
    """Return why an attempt to connect failed; raise ``error`` if it is a cancellation from outside.

    ``closed``: the link is, and so the cancellation may be its own, swallowed by redis-py on the way.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # that which redis-py swallowed, if it is not this one
        raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
    if not isinstance(error, asyncio.CancelledError):
        return error
    if closed:
        raise error
    found = RuntimeError("CancelledError, although nobody cancelled the attempt to connect")
    found.__cause__ = error
    return found


def too_slow(name: bytes, duration: float, claimed: bool) -> Unreachable:
    """Return the error for a request whose grants, of ``duration`` seconds, are over whenever they get here."""
    return Unreachable(
        f"Redis takes longer to answer about {text(name)!r} than a lease of {duration:g} seconds lasts: what was "
        "granted was over before it was heard of, again and again. Nothing is held; "
        + ("raise Coordinator(claim=)" if claimed else "give it a longer ttl")
    )


def time_is_up(call: Call, cause: BaseException | None = None) -> SyncError:
    """Return the error for a call that is not sent again: why, or that nobody knows what became of it."""
    error = call.connection_error
    if error is None or (call.ambiguous and isinstance(error, CommandRefused)):
        return unanswered(call.name, cause, error, within=round(now() - call.begun, 1))
    return error


def not_possible(message: str, what: str) -> Exception:
    """An answer while the link was set up that is an error."""
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
    if isinstance(error, NotAdoptable):
        return PushUnavailable(f'{error}; use Coordinator(client, push="never") to poll instead')
    return answered(b"", error) or refusal(b"", f"ERR {error}")


REFUSED = (
    PushUnavailable,
    NotAdoptable,
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.ResponseError,
    redis.exceptions.DataError,
)
"""Connecting will not succeed, however often it is tried."""
MAYBE_LATER = (
    Unreachable,
    redis.exceptions.RedisError,
    OSError,
    TimeoutError,
    CommandRefused,
    hiredis.HiredisError,
)
"""The server or the network fails, and may answer later."""
EXPECTED = (*REFUSED, *MAYBE_LATER)
"""All else comes from the caller's own client, such as from its credential provider. That may succeed later, too."""
