"""Failures of commands: one line that says what to do, and the exit code for it."""

from __future__ import annotations

import ssl
from typing import Final

from redis.asyncio.sentinel import MasterNotFoundError, SlaveNotFoundError
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio import CommandRefused, SyncError
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.errors._wording import page

from .._client.address import Address

USAGE: Final = 2
UNREACHABLE: Final = 69
"""EX_UNAVAILABLE of sysexits.h."""
BUG: Final = 70
"""EX_SOFTWARE."""
DENIED: Final = 77
"""EX_NOPERM."""
INTERRUPTED: Final = 130
EXPECTED: Final = (RedisError, RedisClusterException, SyncError, OSError)
"""The errors that servers and networks cause; any other exception is a bug."""
COMMON_EXITS: Final = {
    USAGE: "wrong usage, or an address that cannot be read",
    UNREACHABLE: "the server cannot be reached, or cannot serve now",
    BUG: "a bug of this command",
    DENIED: "the server refused the password, or a command",
    INTERRUPTED: "ended by Ctrl-C",
}
"""Exit codes of every command."""


class Failure(Exception):
    """The end of a command by an error: one line for people, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def explained(error: BaseException, address: Address) -> Failure:
    """Return what to tell the user about an error of a server, of the network or of this package."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, BaseExceptionGroup):
        return explained(error.exceptions[0], address)
    where = address.shown
    if isinstance(error, (AuthenticationError, AuthenticationWrongNumberOfArgsError)):
        return Failure(f"{where} refused the login: {_reason(error)}. {_LOG_IN}", DENIED)
    if isinstance(error, PermissionDenied):
        return Failure(f"{where}: {_reason(error)}", DENIED)
    if isinstance(error, (NoPermissionError, AuthorizationError)):
        what = f"{where} refused a command: {_reason(error)}. The rights: {_RIGHTS}"
        return Failure(what, DENIED)
    if isinstance(error, CommandRefused) and error.code == "MOVED":
        return Failure(f"{where} is one node of a cluster: use redis+cluster://{where}", UNREACHABLE)
    if isinstance(error, CommandRefused):
        return Failure(f"{where}: {_reason(error)}", UNREACHABLE)
    if isinstance(error, (MasterNotFoundError, SlaveNotFoundError)):
        # Their message shows the clients of all sentinels.
        advice = "Check the service name and that Sentinel runs; during a failover, try again in some seconds"
        return Failure(f"no primary was found for {where}. {advice}", UNREACHABLE)
    if address.topology == "sentinel" and "unknown command 'sentinel'" in str(error).lower():
        return Failure(f"cannot use {where}: that is no sentinel. For a server, use redis://HOST:PORT", UNREACHABLE)
    if isinstance(error, RedisClusterException):
        return Failure(_about_cluster(error, address), UNREACHABLE)
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError)) and not isinstance(error, SyncError):
        return Failure(f"cannot reach {where}: {_reason(error)}. {_advice(error, address)}", UNREACHABLE)
    return Failure(f"{where}: {_reason(error)}", UNREACHABLE)


_LOG_IN: Final = "Set REDIS_USERNAME and REDIS_PASSWORD, or put USER:PASSWORD@ into REDIS_URL"
_RIGHTS: Final = page("operations/servers", "rights")


def _reason(error: BaseException) -> str:
    """Return an error's message in one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _about_cluster(error: RedisClusterException, address: Address) -> str:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (AuthenticationError, NoPermissionError)):
            return str(explained(chain, address))
        chain = chain.__cause__ or chain.__context__
    advice = "Check --url (or REDIS_URL) and that its nodes run; for a server that is no cluster, use redis://HOST:PORT"
    return f"cannot use {address.shown}: {_reason(error)}. {advice}"


def _advice(error: BaseException, address: Address) -> str:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ssl.SSLCertVerificationError):
            return "Name the authority of its certificate with --tls-ca FILE"
        if isinstance(chain, ssl.SSLError):
            return "Does it speak TLS? If not, use redis:// in place of rediss://"
        chain = chain.__cause__ or chain.__context__
    if address.tls and isinstance(error, (RedisTimeoutError, TimeoutError)):
        return "Does it run, and does it speak TLS? If not, use redis:// in place of rediss://"
    if "closed by server" in str(error).lower() and not address.tls:
        return "If it speaks TLS, use rediss:// in place of redis://"
    return "Check --url (or REDIS_URL) and that the server runs"
