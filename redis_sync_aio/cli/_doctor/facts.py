"""The answers of servers about themselves. Nothing here asks or judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .key_rights import KeyRights

SETTINGS = (
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "appendfsync",
    "save",
    "stop-writes-on-bgsave-error",
    "timeout",
    "tcp-keepalive",
    "maxclients",
    "client-output-buffer-limit",
    "notify-keyspace-events",
    "repl-ping-replica-period",
    "cluster-require-full-coverage",
)
"""Names that CONFIG GET is asked for, one by one; what INFO tells is not needed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer that is an error: the server, or its ACL, does not allow the question."""

    why: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The answers of one server."""

    where: str
    info: Mapping[str, Any]
    """The reply to INFO; empty if it may not be asked."""
    settings: Mapping[str, str]
    """The reply to CONFIG GET; empty if it may not be asked."""
    latency: float | None = None
    """Seconds that a command takes, the median of some; None if TIME may not be asked."""
    ahead: float | None = None
    """Seconds that the clock of the server is ahead of this machine's, at least; negative: behind; None: as above."""
    slowest: tuple[str, float] | None = None
    """The slowest command of the last hour, without its arguments, and its seconds."""
    cluster: Mapping[str, str] = field(default_factory=dict)
    """The reply to CLUSTER INFO; empty if it is no cluster."""
    nodes: Sequence[Sequence[str]] = ()
    """The reply to CLUSTER NODES: the words of each line."""

    @property
    def pings(self) -> int:
        """Return the seconds between two signs of life of a primary to its replicas."""
        return self.setting("repl-ping-replica-period") or 10

    def number(self, name: str) -> int | None:
        """Return a number of INFO; None if it is not there."""
        value = self.info.get(name)
        return int(value) if isinstance(value, (int, float)) else None

    def setting(self, name: str) -> int | None:
        """Return a setting that is a number; None if it cannot be read."""
        value = self.settings.get(name, "")
        return int(value) if value.lstrip("-").isdigit() else None

    @property
    def needed_replicas(self) -> int | None:
        """Number of replicas without which a primary refuses writes; None if it cannot be read."""
        # Either of the two settings turns the check off if it is 0.
        return 0 if self.setting("min-replicas-max-lag") == 0 else self.setting("min-replicas-to-write")

    @property
    def is_replica(self) -> bool:
        """Whether it follows another server."""
        return self.info.get("role") in ("slave", "replica")


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of the user of this connection."""

    user: str = ""
    scripts: Refused | None = None
    """The reason that scripts cannot be called; None if they can."""
    commands_known: bool = False
    """Whether the server said which commands are allowed."""
    missing: Sequence[str] = ()
    """Commands that scripts use, and that the user may not run."""
    keys: KeyRights | None = None
    """The names that its locks may have; None: not known."""
    resp3: Refused | None = None
    """The reason that there is no RESP3."""
    push: Refused | None = None
    """The reason that no message of a channel arrives."""
    listeners: int = 1
    """Number of connections that got a message of a channel that only this program knows."""
    prefix: str = ""
    """The prefix of the channels."""


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The answers of one sentinel."""

    where: str
    service: Mapping[str, str]
    """The reply to SENTINEL MASTER; empty if there was none."""
    quorum: Refused | None = None
    """The reason that a failover is not possible now."""
    replicas: Sequence[Mapping[str, str]] = ()
    """The reply to SENTINEL REPLICAS."""
    others: Sequence[Mapping[str, str]] = ()
    """The reply to SENTINEL SENTINELS."""
    announced: bool = False
    """Whether only other sentinels name it; it is not in the address."""
