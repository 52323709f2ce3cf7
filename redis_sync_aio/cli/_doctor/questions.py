"""Ask a server about itself. Every command here reads only; a refused one is an answer, too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from .._session import Session
from .facts import SETTINGS, Facts, Refused

Ask: TypeAlias = Callable[..., Awaitable[Any]]
"""Sends a command to one server; returns its answer, or `Refused`."""


def asking(client: Redis) -> Ask:
    """Return how to ask the server of ``client``."""
    untyped: Any = client

    async def ask(*words: Any) -> Any:
        try:
            return await untyped.execute_command(*words)
        except ResponseError as error:
            return Refused(str(error))

    return ask


def asking_node(cluster: RedisCluster, node: Any) -> Ask:
    """Return how to ask one node of a cluster."""

    async def ask(*words: Any) -> Any:
        try:
            return await cluster.execute_command(*words, target_nodes=node)
        except ResponseError as error:
            return Refused(str(error))

    return ask


def servers(session: Session) -> dict[str, Ask]:
    """Return how to ask each server that grants locks, by its address."""
    client = session.client
    if isinstance(client, RedisCluster):
        return {str(node.name): asking_node(client, node) for node in client.get_primaries()}
    return {session.address.shown: asking(client)}


async def facts_of(where: str, ask: Ask) -> Facts:
    """Return what a server says about itself."""
    info = await ask("INFO")
    settings: dict[str, str] = {}
    for name in SETTINGS:
        found = await ask("CONFIG GET", name)
        if isinstance(found, Refused):
            break
        settings |= {str(key): str(value) for key, value in found.items()}
    return Facts(where, {} if isinstance(info, Refused) else info, settings)
