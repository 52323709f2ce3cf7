"""Counters of the server: commands that clients sent, reads from their sockets, connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import redis


@dataclass(frozen=True, slots=True)
class Look:
    """The server's counters at one moment."""

    calls: Mapping[str, int]
    reads: int
    cpu: float  # seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """The difference between two looks."""

    commands: int
    reads: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Sends:
    """Separates the commands that a contestant sends from those that its scripts call: the server counts both.

    Attributes:
        names: the commands it sends itself.
        per_script: how often one run of its scripts calls a command that is among ``names`` as well.
    """

    names: tuple[str, ...]
    per_script: Mapping[str, int]

    def cost(self, before: Look, after: Look) -> Cost:
        """Return the cost between two looks; the second look itself was one read."""

        def spent(name: str) -> int:
            return after.calls.get(name, 0) - before.calls.get(name, 0)

        scripts = spent("evalsha") + spent("eval")
        own = sum(spent(name) - scripts * self.per_script.get(name, 0) for name in self.names)
        return Cost(own, after.reads - before.reads - 1, after.cpu - before.cpu)


class ServerStats:
    """A separate blocking connection for reading the server's counters."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)

    def look(self) -> Look:
        """Read the counters; one command, one read."""
        info: dict[str, Any] = self.client.info("stats", "commandstats", "cpu")
        prefix = "cmdstat_"
        calls = {key.removeprefix(prefix): int(value["calls"]) for key, value in info.items() if key.startswith(prefix)}
        cpu = float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
        return Look(calls, int(info["total_reads_processed"]), cpu)

    def script_time(self) -> tuple[int, float]:
        """Return the number of scripts run by EVALSHA, and the microseconds of server time they took."""
        stats: dict[str, Any] = self.client.info("commandstats")
        own = stats.get("cmdstat_evalsha", {"calls": 0, "usec": 0})
        return int(own["calls"]), float(own["usec"])

    def connections(self) -> int:
        """Return the number of connected clients, including this one."""
        info: dict[str, Any] = self.client.info("clients")
        return int(info["connected_clients"])

    def queue_entries(self) -> int:
        """Return the total number of elements in all lists, sets, sorted sets and streams."""
        client: Any = self.client
        sizes = {"list": client.llen, "set": client.scard, "zset": client.zcard, "stream": client.xlen}
        kinds = ((key, client.type(key)) for key in client.scan_iter(count=1000))
        return sum(int(sizes[kind](key)) for key, kind in kinds if kind in sizes)

    def milliseconds_left(self, key: str) -> int:
        """Return the PTTL of ``key``; negative when it has none or is gone."""
        return int(self.client.pttl(key))

    def flush(self) -> None:
        """Empty the database; loaded scripts stay."""
        self.client.flushall()

    def version(self) -> str:
        """Return product and version."""
        info: dict[str, Any] = self.client.info("server")
        return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
