"""The first contact with a server: a wrong address, or a server that does not run, is reported within about a second.

``retry_for`` of a coordinator is for outages of what has worked. Where nothing has answered yet, a command is not
repeated for that long while connections are refused: nothing listens there, or the name is not known. A connection that
is silent, or that is opened and then closed, is no refusal, nor is a server that is loading its data.
"""

from __future__ import annotations

import redis.exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from .._client.settings import RedisClient, address_of

FIRST_CONTACT = 1.0
"""Seconds after which a command fails if an attempt to connect that began then is refused."""
_NOT_REFUSED = (
    TimeoutError,
    redis.exceptions.TimeoutError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
)
_answered: set[str] = set()
"""Addresses at which a server has answered this process. (All shards of a cluster have that of the cluster.)"""


def has_answered(client: RedisClient) -> bool:
    """Return True if a server has answered at the address of ``client``."""
    return address_of(client) in _answered


def note_answer(client: RedisClient) -> None:
    """Note that a server answers at the address of ``client``."""
    _answered.add(address_of(client))


def is_refused(error: BaseException | None) -> bool:
    """Return True if ``error`` says that no connection can be opened; Sentinel: that there is no primary."""
    while error is not None and not isinstance(error, _NOT_REFUSED):
        if isinstance(error, (OSError, MasterNotFoundError)):
            return True
        error = error.__cause__ or error.__context__
    return False
