"""The options that all primitives have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .._core.arguments import Seconds, count
from .._core.keys import Engine
from .._leases.hold import OnLost


class Wanted(NamedTuple):
    """The part of a request for several locks that each of them gets."""

    ttl: Seconds | None
    label: str | None


def by_scripts(engine: Engine, what: str) -> Engine:
    """Return the ``engine`` of a primitive that needs scripts; raise ValueError that names it for "watch"."""
    if engine == "watch":
        raise ValueError(f'{what} needs scripts: engine must be "lua" or "auto", not "watch"')
    return engine


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Options for the duration and the end of leases, as the caller gave them. `AsyncLock` explains each.

    A primitive checks them when it is made.
    """

    ttl: Seconds | None
    auto_renew: bool
    max_hold: Seconds | None
    on_lost: OnLost
    engine: Engine
    share: bool = False
    linger: Seconds = 0.0
    max_waiting: int | None = None

    def checked_max_waiting(self) -> int | None:
        """Return ``max_waiting``, or raise TypeError or ValueError."""
        if self.max_waiting is None:
            return None
        if self.share:
            raise ValueError(
                "max_waiting cannot be combined with share=True, since tasks that share wait behind one request: "
                "leave one of them out"
            )
        return count(self.max_waiting, "max_waiting")
