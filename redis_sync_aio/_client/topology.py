"""Where the keys of a client's names are: on its server, or on those of a cluster."""

from __future__ import annotations

from typing import Protocol

from redis.asyncio import Redis, RedisCluster

from .cluster import Cluster
from .primary_pool import SlotPool
from .settings import Client


class Topology(Protocol):
    """The servers behind the client that a user gave."""

    def client_of(self, *keys: bytes) -> Redis:
        """Return a client whose connections lead to whichever server has ``keys`` when they are taken.

        Raises ValueError when those need not be on the same one.
        """
        ...

    def clients(self) -> list[Redis]:
        """Return a client of each server that is known; the first one is always the same."""
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


def slot_of(client: Redis) -> int | None:
    """Return the hash slot of the keys that ``client``, one of `Topology`, is for; None: it is not of a cluster."""
    pool = client.connection_pool
    return pool.slot if isinstance(pool, SlotPool) else None


def servers_of(client: Client) -> OneServer | Cluster:
    """Return where the keys are; for one cluster client it is always the same object."""
    return Cluster.of(client) if isinstance(client, RedisCluster) else OneServer(client)
