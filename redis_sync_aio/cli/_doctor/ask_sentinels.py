"""Ask sentinels about the service, each other and its replicas, and the replicas about themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException
from redis.exceptions import TimeoutError as RedisTimeoutError

from .._session import Session
from .facts import Facts, Refused, SentinelFacts
from .questions import Ask, asking, facts_of, text

T = TypeVar("T")
SILENT = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError)
"""The errors that a server raises by not answering."""


async def sentinel_facts(session: Session) -> list[SentinelFacts]:
    """Return what each sentinel of the address, and each that these announce, says about the service."""
    found: list[SentinelFacts] = []
    for (host, port), client in zip(session.address.hosts, session.sentinels, strict=False):
        found.append(await _about_service(f"{host}:{port}", asking(client), session.address.service))
    known = {one.where for one in found}
    for where, number in _announced(it for one in found for it in one.others):
        if f"{where}:{number}" not in known and session.sentinel_at is not None:
            async with session.sentinel_at(where, number) as client:
                ask = asking(client)
                found.append(await _about_service(f"{where}:{number}", ask, session.address.service, announced=True))
    return found


async def _about_service(where: str, ask: Ask, service: str, announced: bool = False) -> SentinelFacts:
    silent = SentinelFacts(where, {}, announced=announced)

    async def about() -> SentinelFacts:
        quorum = await ask("SENTINEL", "CKQUORUM", service)
        no_quorum = quorum if isinstance(quorum, Refused) and "NOQUORUM" in quorum.why else None
        return SentinelFacts(
            where,
            _described(await ask("SENTINEL", "MASTER", service)),
            no_quorum,
            _each_described(await ask("SENTINEL", "REPLICAS", service)),
            _each_described(await ask("SENTINEL", "SENTINELS", service)),
            announced,
        )

    return await _or_silent(about, silent)


async def replica_facts(session: Session, sentinels: Sequence[SentinelFacts]) -> dict[str, Facts | None]:
    """Return what each replica says about itself, by its address; None: it does not answer."""
    found: dict[str, Facts | None] = {}
    async for where, ask in _replicas(session, sentinels):
        found[where] = await _or_silent(lambda where=where, ask=ask: facts_of(where, ask), None)  # type: ignore[misc]
    return found


async def _replicas(session: Session, sentinels: Sequence[SentinelFacts]) -> AsyncIterator[tuple[str, Ask]]:
    if isinstance(session.client, RedisCluster):
        for node in session.client.get_replicas():
            yield str(node.name), asking(session.client, target_nodes=node)
    for host, port in _announced(it for one in sentinels for it in one.replicas):
        if session.server_at is not None:
            async with session.server_at(host, port) as client:
                yield f"{host}:{port}", asking(client)


def _announced(found: Iterable[Mapping[str, str]]) -> list[tuple[str, int]]:
    """Return the addresses that sentinels know, each once."""
    return sorted({(it["ip"], int(it["port"])) for it in found if "ip" in it and "port" in it})


async def _or_silent(about: Callable[[], Awaitable[T]], silent: T) -> T:
    try:
        return await about()
    except SILENT:
        return silent


def _described(answer: Any) -> dict[str, str]:
    """Return the names and values of an answer, which alternate in it."""
    words = [] if isinstance(answer, Refused) else [text(word) for word in answer]
    return dict(zip(words[::2], words[1::2], strict=False))


def _each_described(answer: Any) -> list[dict[str, str]]:
    return [] if isinstance(answer, Refused) else [_described(one) for one in answer]
