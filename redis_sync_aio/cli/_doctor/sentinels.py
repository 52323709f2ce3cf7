"""Checks of sentinels and replicas, any of which may be the primary in a moment, and the questions to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException
from redis.exceptions import TimeoutError as RedisTimeoutError

from .._session import Session, counted
from . import safety, settings
from .facts import Ask, Facts, Refused, SentinelFacts, asking, facts_of, text
from .groups import Finding

ENOUGH = 3
"""Sentinels: with fewer, the end of one is the end of failovers."""
HASTY, SLOW = 1000, 30_000
"""Milliseconds of silence: a primary that counts as dead sooner is often alive; later, leases have ended by then."""
BEHIND = 3
"""Seconds since a replica last said what it has; one is normal."""

_ON_PROMOTION = (settings.eviction, settings.idle_timeout, settings.keepalive, settings.buffers, safety.persistence)


def sentinels(found: Sequence[SentinelFacts]) -> Iterator[Finding]:
    """Yield whether the sentinels can fail over, agree with each other, and are where they say."""
    answered = [one for one in found if one.service]
    for one in found:
        if not one.service:
            yield _silent(one)
    if not answered:
        return
    yield from _quorum(answered)
    yield from _primaries(answered)
    yield from _down_after(answered)


def _silent(one: SentinelFacts) -> Finding:
    meaning = "One sentinel less can agree on a failover, and clients wait for it when they connect."
    if not one.announced:
        return Finding("sentinel", "warn", "it does not answer", meaning, "start it, or drop it", one.where)
    found = "the others announce it at this address, where it does not answer"
    fix = "start it, or set sentinel announce-ip and announce-port; if it is gone: SENTINEL RESET on the others"
    return Finding("sentinel", "warn", found, meaning, fix, one.where)


def _quorum(answered: Sequence[SentinelFacts]) -> Iterator[Finding]:
    one = answered[0]
    total, quorum = int(one.service.get("num-other-sentinels", 0)) + 1, int(one.service.get("quorum", 0))
    if refused := next((it.quorum for it in answered if it.quorum), None):
        meaning = "When the primary dies no replica is promoted, and no lock can be acquired."
        yield Finding("quorum", "bad", refused.why.rstrip("."), meaning, "bring sentinels back, or lower the quorum")
    elif (differing := _by_value(answered, "quorum")) is not None:
        meaning = "Which failovers happen depends on which sentinel notices first that the primary is dead."
        fix = "SENTINEL SET … quorum: the same majority on all sentinels"
        yield Finding("quorum", "warn", f"the sentinels have different quorums: {differing}", meaning, fix)
    elif total < ENOUGH:
        found = f"{counted(total, 'sentinel watches', 'sentinels watch')} the service"
        meaning = "When the machine of one is lost, the other cannot fail over."
        if total == 1:
            meaning = "When its machine is lost, nothing fails over."
        yield Finding("quorum", "warn", found, meaning, "run three sentinels, on three machines")
    elif quorum * 2 <= total:
        meaning = "A minority may declare the primary dead; needless failovers lose grants."
        fix = "SENTINEL SET … quorum: a majority"
        yield Finding("quorum", "warn", f"the quorum is {quorum} of {total}", meaning, fix)
    else:
        yield Finding("quorum", "ok", f"{total} sentinels, quorum {quorum}")


def _primaries(answered: Sequence[SentinelFacts]) -> Iterator[Finding]:
    named = [replace(it, service={"primary": f"{it.service.get('ip')}:{it.service.get('port')}"}) for it in answered]
    if (differing := _by_value(named, "primary")) is not None:
        meaning = "Clients use different servers, and both grant the same locks."
        fix = "wait for the end of a failover; if it stays so: SENTINEL RESET on those that are wrong"
        yield Finding("primary", "bad", f"the sentinels name different primaries: {differing}", meaning, fix)


def _down_after(answered: Sequence[SentinelFacts]) -> Iterator[Finding]:
    values = [int(it.service.get("down-after-milliseconds", 0)) for it in answered]
    shortest, longest = min(values), max(values)
    if not shortest:
        return
    if shortest < HASTY:
        found, meaning = f"down-after-milliseconds is {shortest}", "A short pause is a failover, which may lose grants."
        yield Finding("down-after", "warn", found, meaning, "SENTINEL SET … down-after-milliseconds 5000")
    elif longest >= SLOW:
        found = f"down-after-milliseconds is {longest}"
        meaning = (
            "When the primary dies, nothing is acquired or renewed for at least that long: shorter leases are lost."
        )
        yield Finding("down-after", "warn", found, meaning, "SENTINEL SET … down-after-milliseconds 5000")
    else:
        yield Finding("down-after", "ok", f"down-after-milliseconds is {longest}")


def _by_value(answered: Sequence[SentinelFacts], name: str) -> str | None:
    """Return what each says if they differ, else None."""
    if len({it.service.get(name) for it in answered}) == 1:
        return None
    return ", ".join(f"{it.service.get(name)} at {it.where}" for it in answered)


def replicas(
    primary: Facts, found: Mapping[str, Facts | None], watching: Sequence[SentinelFacts] = ()
) -> Iterator[Finding]:
    """Yield whether each replica could go on where the primary stops."""
    for where, facts in found.items():
        yield from (replace(one, where=f"replica {where}") for one in _replica(primary, facts))
    answered = [one for one in watching if one.service]
    priorities = {it.get("slave-priority", "100") for one in answered for it in one.replicas}
    if answered and not found:
        meaning = "When the primary dies no server takes over, and no lock can be acquired until it is back."
        yield Finding("replica", "warn", "the service has no replica", meaning, "add a replica")
    elif priorities == {"0"}:
        meaning = "None of them is ever promoted: when the primary dies, no lock can be acquired until it is back."
        fix = "CONFIG SET replica-priority 100 on one that may become the primary"
        yield Finding("replica", "bad", "replica-priority of every replica is 0", meaning, fix)


def _replica(primary: Facts, facts: Facts | None) -> Iterator[Finding]:
    if facts is None:
        meaning = "Once it is promoted, no lock can be acquired from here."
        fix = "start it, open the way to it, or set replica-announce-ip and replica-announce-port"
        yield Finding("replica", "warn", "it does not answer", meaning, fix)
        return
    problems = list(_once_promoted(_differences(primary, facts)))
    problems += _once_promoted(one for check in _ON_PROMOTION for one in check(facts) if one.level in ("warn", "bad"))
    behind = list(_behind(facts))
    yield from behind
    yield from problems
    if not behind and not problems:
        yield Finding("replica", "ok", "it could take over")


def _behind(facts: Facts) -> Iterator[Finding]:
    meaning = "If it is promoted, what was granted since then is lost: others acquire locks that are still held."
    if facts.info and not facts.is_replica:
        also, fix = "it is a primary itself", "wait for the end of a failover; if it stays so: REPLICAOF the other"
        yield Finding("role", "bad", also, "Clients that are connected to it are granted locks that others hold.", fix)
    if facts.is_replica and facts.info.get("master_link_status") != "up":
        fix = "see its log, and check the network, its password (primaryauth, masterauth) and repl-backlog-size"
        yield Finding("lag", "bad", "its link to the primary is down", meaning, fix)
    elif facts.is_replica and (silent := facts.number("master_last_io_seconds_ago") or 0) > facts.pings + BEHIND:
        fix = "look at the load of both servers and at the network"
        yield Finding("lag", "warn", f"it has heard nothing of the primary for {silent} s", meaning, fix)


def _differences(primary: Facts, facts: Facts) -> Iterator[Finding]:
    ours, theirs = (settings.version_of(one) for one in (facts, primary))
    if ours and theirs and ours != theirs:
        found, meaning = f"it is {ours}, the primary {theirs}", "The older one may not be able to follow the other."
        yield Finding("version", "warn", found, meaning, "run the same version everywhere")
    least = primary.needed_replicas
    if least and facts.needed_replicas == 0:
        meaning = "It goes on granting locks when it is cut off, next to a newer primary."
        off = "min-replicas-max-lag" if facts.setting("min-replicas-max-lag") == 0 else "min-replicas-to-write"
        found, fix = f"{off} is 0 here", f"CONFIG SET {off} {primary.setting(off)} there, too"
        yield Finding("min-replicas", "warn", found, meaning, fix)


def _once_promoted(found: Iterable[Finding]) -> Iterator[Finding]:
    """Say of what matters once it is the primary, and so breaks nothing yet."""
    for one in found:
        meaning = f"Once it is the primary: {one.meaning[0].lower()}{one.meaning[1:]}"
        yield replace(one, level="warn", meaning=meaning)


# -- Ask sentinels about the service, each other and its replicas, and the replicas about themselves -----------


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
