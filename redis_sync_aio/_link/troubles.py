"""What can go wrong with a link, and the errors that say so."""

from __future__ import annotations

import redis.exceptions

from .._types import text
from ..errors import CommandRefused, LinkUnavailable, Unreachable
from .adopt import NotAdoptable
from .call import TRANSIENT, Call, error_code


def perhaps(call: Call) -> Unreachable:
    """A call that is not repeated lost its answer."""
    return Unreachable(
        f"the connection was lost before the answer about {text(call.name)!r} arrived: it may or may not have "
        "happened; look at statistics()"
    )


def not_possible(message: str, what: str) -> Exception:
    """An answer while the link was set up that is an error."""
    if error_code(message) in TRANSIENT:
        return redis.exceptions.ConnectionError(message)
    return LinkUnavailable(
        f"the server does not allow {what}, which pushed wake-ups need: {message}; allow it, or use "
        'Coordinator(client, push="never") to poll instead'
    )


def code(error: Exception) -> str:
    """Return the code of what redis-py raised when it connected."""
    if isinstance(error, redis.exceptions.NoPermissionError):
        return "NOPERM"
    if isinstance(error, redis.exceptions.ConnectionError):  # AuthenticationError is one
        return "NOAUTH"
    return "ERR"


REFUSED = (
    LinkUnavailable,
    NotAdoptable,
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.ResponseError,
    redis.exceptions.DataError,
)
"""Connecting will not succeed, however often it is tried."""
OUT_OF_REACH = (Unreachable, redis.exceptions.RedisError, OSError, TimeoutError, CommandRefused)
"""It may, later."""
