"""Clients that are made from an address, and closed by what made them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel

from .._core import arguments
from .address import Address, parse_address
from .settings import RedisClient

_closing: set[asyncio.Task[None]] = set()


class OwnedClient:
    """A client, and the clients of the sentinels that lead to its server."""

    def __init__(self, client: RedisClient, sentinels: tuple[Redis, ...] = ()) -> None:
        self.client = client
        self._sentinels = sentinels

    async def close(self) -> None:
        """Close all of them, also after an error or a cancellation. Idempotent."""
        clients = (self.client, *self._sentinels)
        await _close_all(clients)

    def start_closing(self) -> asyncio.Task[None]:
        """Start to `close` in the running loop. The task is kept until it is done."""
        task = asyncio.create_task(self.close(), name="redis_sync_aio close of a client")
        _closing.add(task)
        task.add_done_callback(_closing.discard)
        return task


async def _close_all(clients: tuple[RedisClient, ...]) -> None:
    if clients:
        try:
            await clients[0].aclose()
        finally:
            await _close_all(clients[1:])


def owned_client(url: str, options: Mapping[str, Any] | None) -> OwnedClient:
    """Make a client for ``url``, with ``options`` of redis-py. It connects when it is used.

    Raises BadAddress, a ValueError that quotes nothing of an address it cannot read.
    """
    if not isinstance(url, str):
        raise TypeError(f"the url must be str, not {type(url).__name__}")
    address, more = parse_address(url), arguments.options(options, "client_options")
    if address.topology == "server":
        return OwnedClient(Redis.from_url(address.url, **more))
    more = _from(address) | more
    if address.topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return OwnedClient(RedisCluster(startup_nodes=nodes, **more))
    tls = {name: value for name, value in more.items() if name.startswith("ssl")}
    own = tls | dict(more.pop("sentinel_kwargs", None) or {})
    sentinel: Any = Sentinel(address.hosts, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
    client = sentinel.master_for(address.service, **({"db": address.db} | more))
    return OwnedClient(client, tuple(sentinel.sentinels))


def refuse_client_options(coordinator: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise TypeError if ``coordinator`` does not take all ``options``; it says where arguments of the client go."""
    taken = signature(coordinator).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    if unknown := [name for name in options if name not in taken]:
        raise TypeError(
            f"from_url() does not take {', '.join(map(repr, unknown))}: arguments of the client go into "
            f"client_options={{{unknown[0]!r}: …}}"
        )


def _from(address: Address) -> dict[str, Any]:
    """Return the options of redis-py that stand in ``address``."""
    given: dict[str, Any] = {"username": address.username, "password": address.password, "ssl": address.tls or None}
    return {name: value for name, value in given.items() if value is not None}
