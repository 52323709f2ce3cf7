"""The servers of a Redlock: several, and independent of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

from .._acquire.hub import Hub
from .._acquire.implicit import binding_of
from .._client.settings import RedisClient, address_of, is_client, is_cluster
from .._core.display import shown
from .._transport.run_id import run_id

T = TypeVar("T")


def several(clients: Iterable[T]) -> tuple[T, ...]:
    """Return ``clients`` as a tuple; raise TypeError for a single one."""
    if is_client(clients) or binding_of(clients) or not isinstance(clients, Iterable):
        raise TypeError(f"clients must be several, one for each server, not {shown(clients)}; AsyncLock takes one")
    return tuple(clients)


def check_apart(clients: Sequence[RedisClient]) -> None:
    """Raise TypeError or ValueError unless ``clients`` can be those of several servers."""
    if any(map(is_cluster, clients)):
        raise TypeError("clients must be of servers that know nothing of each other; AsyncLock takes a RedisCluster")
    if not clients:
        raise ValueError("clients is empty: it needs one for each server")
    if len({id(client) for client in clients}) < len(clients):
        raise ValueError("clients has one of them twice: each server counts once")
    if len(clients) == 1:
        raise ValueError("clients has one server, and its failure would be everybody's: give three, or use AsyncLock")


async def check_independent(name: str, hubs: Sequence[Hub], within: float) -> None:
    """Raise ValueError if two of ``hubs`` lead to one server: it would count twice for a majority.

    A server is known by its run_id, which is asked for once and has ``within`` seconds to arrive. One that is
    out of reach is asked again at the next use. One that does not tell (an ACL, a proxy, a slow one) is not compared.
    """
    unknown = [hub for hub in hubs if hub.server_id is None and hub.executor.connection_error is None]
    if unknown:
        await asyncio.gather(*(_identify(hub, within) for hub in unknown))
    seen: dict[bytes, int] = {}
    for number, hub in enumerate(hubs, 1):
        if hub.server_id:
            first = seen.setdefault(hub.server_id, number)
            if first != number:
                where = address_of(hub.client)
                raise ValueError(
                    f"clients no. {first} and {number} of {name!r} lead to one server ({where}): it would count twice, "
                    "so that its failure alone could cost the majority. Give one client for each server"
                )


async def _identify(hub: Hub, within: float) -> None:
    found = await run_id(hub.client, within)
    if found is not None:
        hub.server_id = found
