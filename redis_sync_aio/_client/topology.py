"""The servers behind a client: one server, or the shards of a cluster."""

from __future__ import annotations

from typing import Protocol

from redis.asyncio import Redis, RedisCluster

from .cluster import Cluster
from .primary_pool import SlotPool
from .settings import RedisClient, address_of


class Topology(Protocol):
    """The servers behind a client of the caller."""

    def client_of(self, *keys: bytes) -> Redis:
        """Return a client whose connections lead to the server that has ``keys`` when they are taken.

        Raise ValueError if the keys may be on different servers.
        """
        ...

    def clients(self) -> list[Redis]:
        """Return a client of each known server; the first client is always the same."""
        ...

    def address_at(self, key: bytes) -> str:
        """Return the address of the server that has ``key``, as far as is known."""
        ...


class OneServer:
    """The server of a `Redis`."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def client_of(self, *keys: bytes) -> Redis:
        """Return the caller's client."""
        return self._client

    def clients(self) -> list[Redis]:
        """Return the caller's client."""
        return [self._client]

    def address_at(self, key: bytes) -> str:
        """Return the address of the server."""
        return address_of(self._client)


def slot_of(client: Redis) -> int | None:
    """Return the hash slot that ``client``, from a `Topology`, is for; None if it is not of a cluster."""
    pool = client.connection_pool
    return pool.slot if isinstance(pool, SlotPool) else None


def servers_of(client: RedisClient) -> OneServer | Cluster:
    """Return the servers behind ``client``; for one cluster client always the same object."""
    return Cluster.of(client) if isinstance(client, RedisCluster) else OneServer(client)
