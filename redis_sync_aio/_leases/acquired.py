"""The record of an acquisition by a lock that has no `Lease`: see `compat`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import ref

from .._core.clock import now
from .grant import Grant


@dataclass(slots=True, eq=False)
class Acquired:
    """The token of one acquisition, and what became of it."""

    token: bytes
    deadline: float  # local clock
    task: ref[asyncio.Task[object]] | None
    grant: Grant | None = None  # there if it is observed
    released: bool = False  # through the object by which it was acquired

    def ended(self, *, released: bool) -> None:
        """Note that the lock was released, or was found to have ended before; tell observers, the first time."""
        self.released |= released
        if self.grant is not None and (observation := self.grant.observation) is not None:
            time_is_up = now() >= self.deadline
            observation.end(None if released else "expired" if time_is_up else "taken", time_is_up=time_is_up)
