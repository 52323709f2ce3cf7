"""Connections of redis-py that lead to the present primary of a shard, and pools of them."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, NamedTuple, Protocol

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis

from .redis_py import close_idle


class Address(NamedTuple):
    """The address at which a node listens."""

    host: str
    port: int


class Primary(Protocol):
    """The primary of a shard, as connections and pools see it. It may become another node."""

    client: Redis
    """The client whose pool has the connections to it."""
    address: Address | None
    """Its present address; None until a node has answered."""
    gone: bool
    """Whether its shard has lost all slots."""
    connecting: dict[asyncio.Timeout, asyncio.AbstractEventLoop]
    """Timeouts of attempts to connect to that address; a new address ends them."""

    async def locate(self) -> Address:
        """Ask the nodes and return the address of the primary; raise as redis-py does when no node can be reached."""
        ...

    def redirection(self, answer: redis.exceptions.AskError) -> redis.exceptions.TryAgainError:
        """Return the error to raise for ``answer``, MOVED or ASK, of the primary."""
        ...

    def down(self, node: Address) -> None:
        """Note that ``node`` said that the cluster is down."""

    def unreachable(self, node: Address) -> None:
        """Ask all other nodes before ``node``, to which there is no connection."""


class Primaries(Protocol):
    """The primaries of a cluster, by hash slot."""

    def shard_at(self, slot: int) -> Primary:
        """Return the shard that has ``slot``, as far as is known."""
        ...

    async def owner(self, slot: int) -> Primary:
        """Return the shard that has ``slot``; ask the nodes if that is not known, or was wrong."""
        ...


class _Following:
    """Makes a connection class of redis-py lead to the primary of a shard.

    Without a shard it leads to one node, whatever its role is.
    """

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
                await above.disconnect(nowait=True)  # to a node that was the primary before
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
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
                shard.unreachable(Address(self.host, self.port))
                raise
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
        # Outside the handler: else the reply would be its context, and taken for an earlier attempt.
        if self.shard is None:
            raise answer
        raise self.shard.redirection(answer)


@functools.cache
def following(kind: type[Any]) -> type[Any]:
    """Return the class of connections that follow a primary, and are like ``kind`` in all else."""
    return type(f"Following{kind.__name__}", (_Following, kind), {})


class SlotPool(ConnectionPool):
    """Takes each connection from the pool of the shard that has the slot at that moment."""

    def __init__(self, cluster: Primaries, slot: int, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._cluster = cluster
        self.slot = slot

    @property
    def shard(self) -> Primary:
        """The shard that has the slot, as far as is known."""
        return self._cluster.shard_at(self.slot)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        shard = await self._cluster.owner(self.slot)
        return await _pool(shard).get_connection()

    async def release(self, connection: Any) -> None:
        await _pool(connection.shard).release(connection)
        if connection.shard.gone:
            await close_idle(connection.shard.client)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the idle connections of the shard. Those in use may be for other slots."""
        await _pool(self._cluster.shard_at(self.slot)).disconnect(inuse_connections=False)

    def make_connection(self) -> Any:
        return _pool(self._cluster.shard_at(self.slot)).make_connection()


def _pool(shard: Primary) -> Any:
    return shard.client.connection_pool
