"""Ask servers about themselves. Every command here only reads; a refused one is an answer, too."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from .._session import Session
from .facts import SETTINGS, Facts, Refused

Ask: TypeAlias = Callable[..., Awaitable[Any]]
"""Sends a command to one server; returns its answer, or `Refused`."""
SAMPLES = 21
RECENT = 3600


def asking(client: Redis | RedisCluster, **options: Any) -> Ask:
    """Return how to ask the server of ``client``; ``options`` are those of its ``execute_command``."""
    untyped: Any = client

    async def ask(*words: Any) -> Any:
        try:
            return await untyped.execute_command(*words, **options)
        except ResponseError as error:
            return Refused(str(error))

    return ask


def servers(session: Session) -> dict[str, Ask]:
    """Return how to ask each server that grants locks, by its address."""
    client = session.client
    if isinstance(client, RedisCluster):
        return {str(node.name): asking(client, target_nodes=node) for node in client.get_primaries()}
    return {session.address.shown: asking(client)}


async def facts_of(where: str, ask: Ask) -> Facts:
    """Return what a server says about itself."""
    info = await ask("INFO")
    info = {} if isinstance(info, Refused) else info
    latency, ahead = await _clock(ask)
    nodes: Any = await ask("CLUSTER", "NODES") if info.get("cluster_enabled") else ""
    return Facts(
        where,
        info,
        await _settings(ask),
        latency,
        ahead,
        await _slowest(ask),
        _pairs(await ask("CLUSTER", "INFO")) if nodes else {},
        [] if isinstance(nodes, Refused) else [line.split() for line in nodes.splitlines()],
    )


async def _settings(ask: Ask) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SETTINGS:
        answer = await ask("CONFIG GET", name)
        if isinstance(answer, Refused):
            return found
        found |= {str(key): str(value) for key, value in answer.items()}
    return found


async def _clock(ask: Ask) -> tuple[float | None, float | None]:
    """Return the seconds of a round trip, and how far the server's clock is ahead, by the fastest of some.

    Both are None if TIME may not be asked.
    """
    trips: list[tuple[float, float]] = []
    for _ in range(SAMPLES):
        began, by_the_clock = time.monotonic(), time.time()
        answer = await ask("TIME")
        took = time.monotonic() - began
        if not isinstance(answer, Refused):
            trips.append((took, int(answer[0]) + int(answer[1]) / 1e6 - by_the_clock - took / 2))
    if not trips:
        return None, None
    took, ahead = min(trips)
    certain = max(0.0, abs(ahead) - took / 2)
    return median(took for took, _ in trips), certain if ahead > 0 else -certain


async def _slowest(ask: Ask) -> tuple[str, float] | None:
    """Return the slowest command of the last hour; its arguments are nobody's business."""
    entries, now = await ask("SLOWLOG", "GET", 128), await ask("TIME")
    if isinstance(entries, Refused) or isinstance(now, Refused):
        return None
    recent = [entry for entry in entries if int(entry[1]) > int(now[0]) - RECENT and entry[3]]
    found = [(int(entry[2]) / 1e6, str(entry[3][0]).upper()) for entry in recent]
    seconds, name = max(found, default=(0.0, ""))
    return (name, seconds) if found else None


def _pairs(answer: Any) -> dict[str, str]:
    """Return the "name:value" lines of an answer."""
    if isinstance(answer, Refused):
        return {}
    return dict(line.split(":", 1) for line in text(answer).splitlines() if ":" in line)


def text(word: Any) -> str:
    """Return a word of an answer as text."""
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)
