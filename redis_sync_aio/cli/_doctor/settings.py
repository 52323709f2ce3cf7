"""Checks of what a server is and how it is configured."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .findings import Finding, unreadable

OLDEST = (6, 2)
NEAR = 0.85
"""The part of maxmemory from which on the doctor warns."""


def version(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server is recent enough."""
    name = "Valkey" if "valkey_version" in facts.info else "Redis"
    found = str(facts.info.get("valkey_version") or facts.info.get("redis_version", ""))
    if not found:
        yield unreadable("version", "INFO")
    elif tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < OLDEST:
        meaning = "Scripts of this package use commands that it does not have."
        yield Finding("version", "bad", f"{name} {found}", meaning, "upgrade to Redis 6.2 or newer, or to Valkey")
    else:
        yield Finding("version", "ok", f"{name} {found}")


def role(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server takes writes."""
    if facts.is_replica:
        primary = f"{facts.info.get('master_host')}:{facts.info.get('master_port')}"
        yield Finding(
            "role",
            "bad",
            f"this server is a replica of {primary}",
            "It refuses writes, so no lock can be acquired here.",
            f"connect to {primary}, or let Sentinel name the primary (redis+sentinel://)",
        )
    elif facts.info:
        yield Finding("role", "ok", "it is a primary")


def eviction(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server may evict a lock that is held."""
    policy, limit = facts.info.get("maxmemory_policy"), facts.number("maxmemory")
    if policy is None or limit is None:
        yield unreadable("eviction", "maxmemory-policy")
        return
    if policy == "noeviction":
        yield Finding("eviction", "ok", "maxmemory-policy is noeviction")
        return
    meaning = "Held locks have a ttl and may be evicted, and then two clients hold one."
    fix = "CONFIG SET maxmemory-policy noeviction, or keep locks on a server of their own"
    if limit:
        yield Finding("eviction", "bad", f"maxmemory-policy is {policy}", meaning, fix)
    else:
        found = f"maxmemory-policy is {policy}, but there is no maxmemory"
        yield Finding("eviction", "warn", found, f"Once maxmemory is set: {meaning[0].lower()}{meaning[1:]}", fix)


CHECKS = (version, role, eviction)
