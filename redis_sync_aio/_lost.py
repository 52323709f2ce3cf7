"""The event that is set when a lease is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from .lease import Lease


class Lost:
    """An event that is set when the lease is lost; it is never unset, and stays unset by a release."""

    __slots__ = ("_event", "_lease")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._event: anyio.Event | None = None

    def is_set(self) -> bool:
        """Return whether the lease is lost. Looks at the clock: right also when the loop was blocked."""
        return self._lease.is_lost()

    async def wait(self) -> None:
        """Wait until the lease is lost; for ever if it is released first. Safe to cancel."""
        self._lease.check_place()
        if self.is_set():
            return
        event = self._event = self._event or anyio.Event()
        await event.wait()

    def _set(self) -> None:
        if self._event is not None:
            self._event.set()
