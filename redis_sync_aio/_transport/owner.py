"""Weak references to a coordinator from everything that lives as long as its event loop, so it can be collected.

The loop keeps the coordinator's connection, timers and tasks, which refer to it weakly. Strong references are the
caller's, and those of leases, waiting tasks and commands without a reply. So when it is collected, only the connection
is left, and is closed then.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Protocol
from weakref import ReferenceType, finalize, ref

from .._client.owned import OwnedClient
from .._core import logs
from .._core.keys import Keys
from ..errors import SyncError
from .call import Call
from .executor import LinkOwner


class WeakOwner:
    """Passes the reports of a link on to its coordinator, as long as that lives."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = ref(owner)

    def link_pushed(self, payload: bytes) -> None:
        if (owner := self._owner()) is not None:
            owner.link_pushed(payload)

    def link_lost(self, server: str) -> None:
        if (owner := self._owner()) is not None:
            owner.link_lost(server)

    def link_up(self, concerns: Callable[[Keys], bool], server: str, after: float | None) -> None:
        if (owner := self._owner()) is not None:
            owner.link_up(concerns, server, after)

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

    def keys_in_use(self) -> Iterable[Keys]:
        owner = self._owner()
        return () if owner is None else owner.keys_in_use()


class _Link(Protocol):
    def detach(self) -> list[Call]: ...
    def close_without_loop(self) -> None: ...


class _Closable(Protocol):
    async def loop_ends(self) -> None: ...


class Unclosed:
    """Notices that a coordinator ends unclosed: its event loop ends, or it is collected."""

    def __init__(self, coordinator: _Closable, shown: str, link: _Link | None, owned: OwnedClient | None) -> None:
        """``owned``: the client of the coordinator, if that closes it."""
        loop = asyncio.get_running_loop()
        self._dropped = finalize(coordinator, _dropped, shown, loop, link, owned)
        self._dropped.atexit = False
        self._loop_end = _at_loop_end(ref(coordinator))
        with suppress(StopIteration):  # run to its first yield, which registers it with the loop
            self._loop_end.asend(None).send(None)

    def forget(self) -> None:
        """Do not warn when it is collected: it has ended in another way."""
        self._dropped.detach()

    async def closed(self) -> None:
        """Stop watching: the coordinator is closed."""
        self.forget()
        with suppress(RuntimeError):  # it is running: it closes the coordinator at the end of the loop
            await self._loop_end.aclose()


async def _at_loop_end(coordinator: ReferenceType[_Closable]) -> AsyncGenerator[None, None]:
    """Close when the loop ends.

    `asyncio.run`, and all that uses `asyncio.Runner`, cancels all tasks, lets them finish, and then closes the
    asynchronous generators that were started. So do uvloop and aiohttp. That is the right moment: tasks could release
    in their clean-up, and no task of ours has to be cancelled to notice it.
    """
    try:
        yield
    finally:
        if (found := coordinator()) is not None:
            await found.loop_ends()


def _dropped(shown: str, loop: asyncio.AbstractEventLoop, link: _Link | None, owned: OwnedClient | None) -> None:
    """Warn that a coordinator was collected, and close its connections; runs in any thread."""
    if link is not None and not loop.is_running():  # it may never run again
        link.close_without_loop()
    with suppress(RuntimeError):  # its loop is closed
        if link is not None:
            loop.call_soon_threadsafe(link.detach)
        if owned is not None:
            loop.call_soon_threadsafe(owned.start_closing)
    warnings.warn(logs.coordinator_dropped(shown), ResourceWarning, stacklevel=2)
