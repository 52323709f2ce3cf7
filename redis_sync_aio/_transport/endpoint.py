"""Where a link leads to: notices that the client connects elsewhere.

After a planned failover by Sentinel the old primary takes writes for about ten seconds more, and a DNS name may be
pointed at another server while the old one lives on. A connection to such a server answers every command, so it shows
nothing. Therefore, while anything is held or waited for, a check asks once a second where the client would connect:

- Sentinel is asked through the client's own pool. Its answer is compared with the address of the connection.
- A host name is resolved. It leads elsewhere if it has had none of its present addresses before, since the connection
  was opened. So a name whose addresses take turns does not count as moved.

The limit: an address that stays the same shows nothing. When a proxy or a virtual IP leads elsewhere, it has to close
the connections to the old server, or the old server has to refuse writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from .._core import logs
from .._core.cancellation import cancel_repeatedly, cancelled
from .._core.clock import now

CHECK_INTERVAL = 1.0
"""Seconds between two checks."""
AFTER_FAILURE = 10.0
"""Seconds until the next check of a host name that cannot be resolved: each may block a thread for as long."""
CHECK_TIMEOUT = 2.0
"""Seconds that a check may take."""
NEVER = float("-inf")


class EndpointWatch:
    """Watches where a client would connect.

    A link calls `check`; ``moved`` is called with the reason when its connection no longer leads there.
    """

    def __init__(self, client: Redis, moved: Callable[[str], None]) -> None:
        self._client = client
        self._moved = moved
        self._connection: object = None
        self._leads_to: tuple[str | None, int | None] = None, None
        self._named = frozenset[str]()  # the addresses of the host name since the connection was opened
        self._due = NEVER  # local clock
        self._checking: asyncio.Task[None] | None = None
        pool: Any = client.connection_pool
        options = pool.connection_kwargs
        self._by_sentinel = isinstance(pool, SentinelConnectionPool) and pool.is_master
        of_one_server = not self._by_sentinel and "shard" not in options
        self._host = _name(options.get("host")) if of_one_server else None

    def check(self, connection: object, leads_to: tuple[str | None, int | None], needed: Callable[[], bool]) -> None:
        """Start a check if it is due and ``needed``; ``connection`` identifies the present one, which ``leads_to``."""
        if not (self._by_sentinel or self._host) or self._checking is not None:
            return
        first = connection is not self._connection
        if first:
            self._connection, self._leads_to, self._named = connection, leads_to, frozenset()
        # Later addresses of a name are compared with the first ones, so these are needed in any case.
        if (first and self._host) or (now() >= self._due and needed()):
            self._due = now() + CHECK_INTERVAL
            self._checking = asyncio.Task(self._check(connection), name="redis_sync_aio endpoint")
            self._checking.add_done_callback(self._ended)

    async def _check(self, connection: object) -> None:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                with cancel_repeatedly(CHECK_TIMEOUT):
                    why = await (self._ask_sentinel() if self._by_sentinel else self._resolve())
        except (redis.exceptions.RedisError, OSError, TimeoutError):  # the connection is as good as it was
            if self._host:
                self._due = now() + AFTER_FAILURE
            return
        if why and connection is self._connection:
            self._connection = None
            self._moved(why)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._due = now() + AFTER_FAILURE  # raised by a connection class, or a resolver, of the caller
            logs.raise_later(error, of_task=True)

    async def _ask_sentinel(self) -> str:
        pool: Any = self._client.connection_pool
        host, port = await pool.get_master_address()
        if (host, port) == self._leads_to:
            return ""
        return f"Sentinel names {host}:{port} as the primary now"

    async def _resolve(self) -> str:
        assert self._host is not None
        found = await asyncio.get_running_loop().getaddrinfo(self._host, None)
        addresses = frozenset(str(address[0]) for *_, address in found)
        elsewhere = bool(self._named) and not (addresses & self._named)
        self._named = addresses if elsewhere else self._named | addresses
        return f"{self._host} leads to {', '.join(sorted(addresses))} now" if elsewhere else ""

    async def close(self) -> None:
        """Cancel the present check, and wait for its end."""
        if (checking := self._checking) is not None:
            await cancelled(checking)

    def stop(self) -> None:
        """Cancel the present check, without waiting for its end."""
        if self._checking is not None:
            self._checking.cancel()


def _name(host: str | None) -> str | None:
    """Return ``host`` if it is a name that may lead to another server later, else None."""
    if not host or host == "localhost":
        return None
    with suppress(ValueError):
        ip_address(host)
        return None
    return host
