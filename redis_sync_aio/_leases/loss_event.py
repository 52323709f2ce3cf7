"""The event that is set when a lease is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from .keeper import RELEASED

if TYPE_CHECKING:
    from .grant import Grant


class LossEvent:
    """An event that is set when the lease is lost. It is never unset, and a release does not set it."""

    __slots__ = ("_ended", "_lease")

    def __init__(self, lease: Grant) -> None:
        self._lease = lease
        self._ended: anyio.Event | None = None

    def is_set(self) -> bool:
        """Return whether the lease is lost. Looks at the clock: right also when the loop was blocked."""
        return self._lease.is_lost()

    async def wait(self) -> None:
        """Wait until the lease has ended: it is lost (`is_set`), or its release was confirmed. Safe to cancel.

        So a task that watches a lease ends with it.
        """
        self._lease.check_context()
        if self.is_set() or self._lease.state is RELEASED:
            return
        self._ended = self._ended or anyio.Event()
        await self._ended.wait()

    def _notify(self) -> None:
        """Wake those who wait: the lease has ended."""
        if self._ended is not None:
            self._ended.set()
