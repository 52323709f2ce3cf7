"""The servers of a Redlock: several, and independent of each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redis.asyncio import Redis, RedisCluster

from .._core.display import shown
from .._link.client import Client
from ..coordinator import Coordinator


def several(clients: Iterable[Redis | Coordinator]) -> tuple[Redis | Coordinator, ...]:
    """Return ``clients`` as a tuple; raise TypeError for a single one."""
    if isinstance(clients, (Redis, RedisCluster, Coordinator)) or not isinstance(clients, Iterable):
        raise TypeError(f"clients must be several, one for each server, not {shown(clients)}; AsyncLock takes one")
    return tuple(clients)


def check_apart(clients: Sequence[Client]) -> None:
    """Raise TypeError or ValueError unless ``clients`` can be those of several servers."""
    if any(isinstance(client, RedisCluster) for client in clients):
        raise TypeError("clients must be of servers that know nothing of each other; AsyncLock takes a RedisCluster")
    if not clients:
        raise ValueError("clients is empty: it needs one for each server")
    if len({id(client) for client in clients}) < len(clients):
        raise ValueError("clients has one of them twice: each server counts once")
