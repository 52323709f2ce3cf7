"""Connections of redis-py's that lead to the present primary of a shard, and the pools they come from."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, NamedTuple, Protocol

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis

from .redis_py import close_idle


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int


class Primary(Protocol):
    """The primary of a shard, whichever node that is."""

    client: Redis
    """The client whose pool has the connections to it."""
    address: Address | None
    gone: bool
    connecting: dict[asyncio.Timeout, asyncio.AbstractEventLoop]

    async def locate(self) -> Address:
        """Return where it is; raise as redis-py does when no node can be reached."""
        ...

    def elsewhere(self, answer: redis.exceptions.AskError) -> redis.exceptions.TryAgainError:
        """Return the error for such an answer of it."""
        ...

    def down(self, node: Address) -> None:
        """Note that ``node`` said that the cluster is down."""


class Primaries(Protocol):
    """The primaries of a cluster, by hash slot."""

    def shard_at(self, slot: int) -> Primary:
        """Return the one that has ``slot``, as far as is known."""
        ...

    async def owner(self, slot: int) -> Primary:
        """Return the one that has ``slot``; ask the nodes if that is not known, or was wrong."""
        ...


class _Following:
    """What makes a connection class of redis-py's lead to the primary of a shard; None: to one node, whatever it is."""

    host: str
    port: int
    shard: Primary | None

    def __init__(self, *, shard: Primary | None, **options: Any) -> None:
        super().__init__(**options)
        self.shard = shard

    async def connect(self) -> None:
        above: Any = super()
        shard = self.shard
        if shard is not None:
            if above.is_connected and (self.host, self.port) != shard.address:
                await above.disconnect(nowait=True)  # it was the primary once
            if not above.is_connected:
                await self._connect_to_primary(shard)
                return
        await above.connect()

    async def _connect_to_primary(self, shard: Primary) -> None:
        above: Any = super()
        self.host, self.port = await shard.locate()
        async with asyncio.timeout(None) as limit:
            shard.connecting[limit] = asyncio.get_running_loop()
            try:
                await above.connect()
            finally:
                del shard.connecting[limit]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        above: Any = super()
        try:
            return await above.read_response(*args, **options)
        except redis.exceptions.MovedError as error:
            answer: redis.exceptions.AskError = error
        except redis.exceptions.AskError as error:
            answer = error
        except redis.exceptions.ClusterDownError:
            if self.shard is not None:
                self.shard.down(Address(self.host, self.port))
            raise
        # Not inside: it would be taken for what was tried before.
        if self.shard is None:
            raise answer
        raise self.shard.elsewhere(answer)


@functools.cache
def following(kind: type[Any]) -> type[Any]:
    return type(f"Following{kind.__name__}", (_Following, kind), {})


class SlotPool(ConnectionPool):
    """Takes connections from the pool of the shard that has the slot when they are taken."""

    def __init__(self, cluster: Primaries, slot: int, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._cluster = cluster
        self.slot = slot

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        shard = await self._cluster.owner(self.slot)
        return await _pool(shard).get_connection()

    async def release(self, connection: Any) -> None:
        await _pool(connection.shard).release(connection)
        if connection.shard.gone:
            await close_idle(connection.shard.client)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the idle connections of that shard; those in use are not only for this slot."""
        await _pool(self._cluster.shard_at(self.slot)).disconnect(inuse_connections=False)

    def make_connection(self) -> Any:
        return _pool(self._cluster.shard_at(self.slot)).make_connection()


def _pool(shard: Primary) -> Any:
    return shard.client.connection_pool
