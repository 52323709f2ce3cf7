"""Outages of a server, and the first contact with it: pauses between attempts, and messages for the log."""

from __future__ import annotations

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError

from .._client.redis_py import probe
from .._client.replies import error_code
from .._client.settings import RedisClient, address_of, uses_tls
from .._core import logs
from .._core.backoff import Backoff
from .._core.clock import now
from .call import EXPECTED

RECONNECT = Backoff(initial=0.02, cap=0.5)
"""Pauses between attempts to connect, from the first in each outage: a server that is back has to grant in a second."""
RESPITE = Backoff(initial=0.02, cap=0.1)
"""Pauses before connecting again while connections do not last: short, for the sake of short leases."""

ATTEMPT = 0.0003
"""Seconds of a server's time that it takes to set up a connection, about."""
LONGEST = 60.0
"""Most seconds between two attempts."""


def longest_pause(failed: int, overdue: int, clients: int, within: float) -> float:
    """Return the longest pause before the next attempt to connect, in seconds; each takes a random part of it.

    ``failed`` attempts were made, ``overdue`` of which the server did not answer ``within`` the seconds that an attempt
    has. A server that lost all ``clients`` at one moment is busy with their attempts: also with those that were given
    up, so if none is answered in time, none ever is. Therefore they are spread if they take more than half of
    ``within``, and more so after one that was overdue: a connection may cost more than `ATTEMPT`.
    """
    usual = RECONNECT.bound(failed - 1) if failed else 0.0
    twice = 2 * clients * ATTEMPT
    return max(usual, min(twice * 2 ** min(overdue, 3) if overdue else twice - within, LONGEST))


SILENT = 0.5
"""Seconds without an answer after which a TLS handshake is named as the reason."""
LASTS = 1.0
"""Seconds without a connection after which a warning is logged; most reconnects take far less."""
QUIET = 5.0
"""Seconds without a refusal after which the next refusal is logged again."""


class Outage:
    """The time during which a link has no connection, or one to a server that takes no writes; logs its parts."""

    leads_to: tuple[str | None, int | None] = None, None
    """Host and port of the newest connection."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._since: float | None = None  # local clock
        self._warned = False
        self._refused_at = float("-inf")
        self._logged: type[Exception] | None = None  # the latest unexpected error that was logged

    def server(self) -> str:
        """Return the address of the newest connection, or of the client."""
        host, port = self.leads_to
        return address_of(self._client) if host is None else f"{host}:{port}"

    def dropped(self, why: str) -> None:
        """Note that the link gives up its connection; ``why`` may be the error reply of a replica."""
        if error_code(why) != "READONLY":
            logs.log("connection_dropped", server=self.server(), why=why)
            return
        if now() - self._refused_at > QUIET:
            logs.log("read_only", server=self.server(), why=why.rstrip("."))
        self._refused_at = now()

    def begin(self) -> None:
        """Note that a connection is needed and there is none."""
        if self._since is None:
            self._since = now()

    def check(self, why: Exception | None) -> None:
        """Log a warning if it has lasted long enough; ``why`` is the error of the latest attempt to connect."""
        if self._since is None or self._warned or now() - self._since < LASTS or type(why) is self._logged:
            return
        self._warned = True
        reason = "no answer yet" if why is None else f"{type(why).__name__}: {why}".rstrip(".")
        logs.log("connection_lost", server=self.server(), seconds=now() - self._since, why=reason)

    def failed(self, error: Exception, timeout: float) -> Exception:
        """Log an unexpected error of an attempt to connect; return it, with a message where redis-py has none."""
        message = str(error)
        if not isinstance(error, EXPECTED) and type(error) is not self._logged:
            self._logged = type(error)
            logs.connecting_failed(self.server(), error)
        if isinstance(error, TimeoutError) and not message:
            message = f"no connection to {self.server()} within {timeout:g} seconds" + self._tls_hint()
        elif "WRONG_VERSION_NUMBER" in message or "record layer failure" in message:
            message += self._tls_hint()
        elif "reply type byte" in message:
            message += "; what listens on that port does not speak Redis"
        else:
            return error
        found = redis.exceptions.ConnectionError(message)
        found.__cause__ = error
        return found

    def silence(self) -> Exception | None:
        """Return the likely reason why the first connection takes long to open; None if it is not known."""
        if not uses_tls(self._client) or self._since is None or now() - self._since < SILENT:
            return None
        return redis.exceptions.ConnectionError(f"no TLS handshake with {self.server()} yet{self._tls_hint()}")

    def _tls_hint(self) -> str:
        return "; if that is a port without TLS, use redis:// instead of rediss://" if uses_tls(self._client) else ""

    def rest(self) -> None:
        """Note that no connection is needed any more. A warning that was logged is still revoked by `end`."""
        if not (self._warned or self._logged):
            self._since = None

    def end(self) -> None:
        """Note that there is a connection; log that if a warning was logged."""
        if (self._warned or self._logged) and self._since is not None:
            logs.log("connection_restored", server=self.server(), after=now() - self._since)
        self._since, self._warned, self._logged = None, False, None


# -- The first contact with a server: a wrong address, or a server that does not run, is reported within about a second
#
# ``retry_for`` of a coordinator is for outages of what has worked. Where nothing has answered yet, a command is not
# repeated for that long while connections are refused: nothing listens there, or the name is not known. A connection
# that is silent, or that is opened and then closed, is no refusal, nor is a server that is loading its data.


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


async def find_sentinel(client: Redis, response_timeout: float) -> None:
    """Raise the latest refusal if all sentinels of ``client`` refuse connections; return if it has none.

    To be called before the first contact: redis-py asks each sentinel for seconds, and raises nothing meanwhile.
    """
    refusal: Exception | None = None
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    for sentinel in () if manager is None else tuple(manager.sentinels):
        try:
            await probe(sentinel, response_timeout)
        except (redis.exceptions.RedisError, OSError) as error:
            if not is_refused(error):
                return
            refusal = error
        else:
            return
    if refusal is not None:
        raise refusal
