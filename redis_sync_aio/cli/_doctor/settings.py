"""Checks of what a server is, and of its memory and clients."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .groups import Finding, unreadable

OLDEST = (6, 2)
NEAR = 0.85
"""The part of a limit from which on the doctor warns."""
SHORT = 60
"""Seconds: a shorter ``timeout`` closes connections that are in use."""
SMALL = 1 << 20
"""Bytes: a smaller buffer of a subscriber may overflow in a burst of grants."""


def version(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server is recent enough."""
    found = version_of(facts)
    if not found:
        yield unreadable("version", "INFO")
    elif tuple(int(part) for part in found.split()[1].split(".")[:2] if part.isdigit()) < OLDEST:
        meaning = "Scripts of this package use commands that it does not have."
        yield Finding("version", "bad", found, meaning, "upgrade to Redis 6.2 or newer, or to Valkey")
    else:
        yield Finding("version", "ok", found)


def version_of(facts: Facts) -> str:
    """Return which server it is, in which version; empty if it does not tell."""
    name = "Valkey" if "valkey_version" in facts.info else "Redis"
    number = str(facts.info.get("valkey_version") or facts.info.get("redis_version", ""))
    return f"{name} {number}" if number else ""


def role(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server takes writes."""
    if "sentinel" in (facts.info.get("redis_mode"), facts.info.get("server_mode")):
        meaning = "It has no data, so no lock can be acquired here."
        fix = f"name it as such: redis+sentinel://{facts.where}/SERVICE"
        yield Finding("role", "bad", "this is a sentinel, not the server that it watches", meaning, fix)
    elif facts.is_replica:
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


def memory(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server can take more locks."""
    used, limit = facts.number("used_memory"), facts.number("maxmemory")
    if used is None or limit is None:
        return
    if not limit:
        yield Finding("memory", "ok", f"{used / 1e6:,.0f} MB are used, and there is no maxmemory")
        return
    found = f"{used / limit:.0%} of maxmemory is used ({used / 1e6:,.0f} of {limit / 1e6:,.0f} MB)"
    meaning = "At maxmemory nothing can be acquired (OutOfMemory); held locks are still renewed and released."
    fix = "raise maxmemory, or keep locks on a server of their own"
    if used < NEAR * limit:
        yield Finding("memory", "ok", found)
    else:
        yield Finding("memory", "bad" if used >= limit else "warn", found, meaning, fix)


def clients(facts: Facts) -> Iterator[Finding]:
    """Yield whether more clients may connect."""
    limit, used = facts.number("maxclients") or facts.setting("maxclients"), facts.number("connected_clients")
    if not limit or used is None:
        return
    found = f"{used:,} of {limit:,} clients (maxclients) {'is' if used == 1 else 'are'} connected"
    if used < NEAR * limit:
        yield Finding("clients", "ok", found)
        return
    meaning = "When a connection is lost then, it may not be opened again in time to renew leases."
    yield Finding("clients", "warn", found, meaning, "CONFIG SET maxclients to more, or close idle clients")


def idle_timeout(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server closes connections that are still needed."""
    seconds = facts.setting("timeout")
    if seconds is None:
        return
    if not 0 < seconds < SHORT:
        yield Finding("timeout", "ok", f"timeout is {seconds}")
        return
    meaning = "Connections that are silent for so long are closed, those of transactions and of polling waiters too."
    yield Finding("timeout", "warn", f"timeout is {seconds} s", meaning, "CONFIG SET timeout 0")


def keepalive(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server notices clients that are gone without a word."""
    seconds = facts.setting("tcp-keepalive")
    if seconds is None:
        return
    if seconds:
        yield Finding("keepalive", "ok", f"tcp-keepalive is {seconds}")
        return
    meaning = "The server does not notice that a machine is gone, so its waiters are still granted locks."
    yield Finding("keepalive", "warn", "tcp-keepalive is 0", meaning, "CONFIG SET tcp-keepalive 60")


def buffers(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server may close the connection of a process that gets many grants."""
    words = facts.settings.get("client-output-buffer-limit", "").split()
    if "pubsub" not in words:
        return
    hard, soft = (int(word) for word in words[words.index("pubsub") + 1 :][:2])
    if min(limit for limit in (hard or SMALL, soft or SMALL)) >= SMALL:
        yield Finding("buffers", "ok", "client-output-buffer-limit leaves subscribers enough room")
        return
    found = f"client-output-buffer-limit of subscribers (pubsub) is {min(filter(None, (hard, soft))):,} bytes"
    meaning = "A burst of grants to a busy process closes its connection, and its waiters lose their place."
    yield Finding("buffers", "warn", found, meaning, 'CONFIG SET client-output-buffer-limit "pubsub 32mb 8mb 60"')


def events(facts: Facts) -> Iterator[Finding]:
    """Yield whether each command of a lock also publishes events."""
    if flags := facts.settings.get("notify-keyspace-events"):
        meaning = "Each command of a lock publishes events, too, which takes the server some time."
        fix = "CONFIG SET notify-keyspace-events '', unless a program needs them"
        yield Finding("events", "ok", f"notify-keyspace-events is {flags}", meaning, fix)


def readable(facts: Facts) -> Iterator[Finding]:
    """Yield what could not be looked at."""
    if not facts.settings:
        yield unreadable("settings", "CONFIG (replicas, persistence, timeout, keepalive, buffers)")


CHECKS = (version, role, eviction, memory, clients, idle_timeout, keepalive, buffers, events, readable)
