"""A coordinator is known only weakly by what lives as long as its event loop, so it can be dropped.

Its connection, timers and tasks are kept by the loop. They know the coordinator by weak references. What keeps it alive
is the caller's reference, and whoever holds, waits for or asks something: leases, waiting tasks and commands without an
answer refer to it. So when it is collected nothing is left but the connection, which is closed then.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Protocol
from weakref import ReferenceType, finalize, ref

from .._core import logs
from .._core.keys import Keys
from ..errors import SyncError
from .call import Call
from .executor import LinkOwner


class WeakOwner:
    """Tells a coordinator what its link has to tell, as long as the coordinator lives."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = ref(owner)

    def link_pushed(self, payload: bytes) -> None:
        if (owner := self._owner()) is not None:
            owner.link_pushed(payload)

    def link_up(self, concerns: Callable[[Keys], bool]) -> None:
        if (owner := self._owner()) is not None:
            owner.link_up(concerns)

    def link_moved(self) -> None:
        if (owner := self._owner()) is not None:
            owner.link_moved()

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        if (owner := self._owner()) is not None:
            owner.link_refused(error, concerns)

    async def link_closing(self) -> None:
        if (owner := self._owner()) is not None:
            await owner.link_closing()

    def link_client_closed(self) -> None:
        if (owner := self._owner()) is not None:
            owner.link_client_closed()

    def link_needed(self, concerns: Callable[[Keys], bool]) -> bool:
        owner = self._owner()
        return owner is not None and owner.link_needed(concerns)


class _Link(Protocol):
    def detach(self) -> list[Call]: ...
    def close_without_loop(self) -> None: ...


class _Closable(Protocol):
    async def loop_ends(self) -> None: ...


class Unclosed:
    """Notices the end of a coordinator that nobody closed: the end of its event loop, or that it is dropped."""

    def __init__(self, coordinator: _Closable, shown: str, link: _Link | None) -> None:
        loop = asyncio.get_running_loop()
        self._dropped = finalize(coordinator, _dropped, shown, loop, link)
        self._dropped.atexit = False
        self._loop_end = _at_loop_end(ref(coordinator))
        with suppress(StopIteration):  # run to its first yield, which makes the loop know it
            self._loop_end.asend(None).send(None)

    def forget(self) -> None:
        """Say nothing when it is dropped: it has ended in another way."""
        self._dropped.detach()

    async def closed(self) -> None:
        """Notice nothing any more."""
        self.forget()
        with suppress(RuntimeError):  # it is running: it is the one that waits for us, at the end of the loop
            await self._loop_end.aclose()


async def _at_loop_end(coordinator: ReferenceType[_Closable]) -> AsyncGenerator[None, None]:
    """Close when the loop ends.

    `asyncio.run` (and whatever uses `asyncio.Runner`, uvloop and aiohttp too) cancels all tasks, lets them finish, and
    then closes the asynchronous generators that were started. That is the right moment: tasks can still release in
    their clean-up, and no task of ours has to be cancelled to notice.
    """
    try:
        yield
    finally:
        if (found := coordinator()) is not None:
            await found.loop_ends()


def _dropped(shown: str, loop: asyncio.AbstractEventLoop, link: _Link | None) -> None:
    """Close the connection of a coordinator that was collected, in whatever thread, and warn."""
    if link is not None:
        try:
            loop.call_soon_threadsafe(link.detach)
        except RuntimeError:  # its loop is closed
            link.close_without_loop()
    warnings.warn(logs.coordinator_dropped(shown), ResourceWarning, stacklevel=2)
