"""The end of a hub: by `Coordinator.aclose`, with its client or its event loop, in a forked child, or forgotten."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

from .._client.cluster import Cluster
from .._client.owned import OwnedClient
from .._client.redis_py import CloseObserver, close_idle
from .._client.settings import running_loop
from .._client.topology import OneServer
from .._core.cancellation import wait_shielded
from .._core.observing import Observing
from .._leases.grant import Grant
from .._leases.manager import GrantManager
from .._transport.cluster_link import ClusterLink
from .._transport.executor import Executor
from .._transport.link import Link
from .._transport.owner import Unclosed
from .options import HubOptions
from .resource import Resource

living: weakref.WeakValueDictionary[int, Closing] = weakref.WeakValueDictionary()
"""The ends of all hubs of this process, by their ids. (`valuerefs` copies them in one step, whatever threads do.)"""
begun: set[Closing] = set()
"""Those that have begun and are not done. `asyncio.run` cancels their tasks at its end. Then nothing else keeps an
implicit hub, which has left `implicit.hubs`, until the generators of the loop end and begin it again."""

AFTER_DRAIN = 0.05
"""Seconds after a drain in which the body of `UntilSignal` cancels its tasks. Those that are left get their errors."""


class ClosableHub(Protocol):
    """A hub, as its end knows it."""

    options: HubOptions
    loop: asyncio.AbstractEventLoop
    servers: OneServer | Cluster
    link: Link | ClusterLink | None
    executor: Executor
    manager: GrantManager
    resources: dict[bytes, Resource]
    why_closed: str | None
    emptied: asyncio.Event | None
    held_back: Callable[[], Awaitable[None]] | None
    forked: bool
    observing: Observing

    def check_context(self) -> None: ...
    def leave_to_parent(self) -> None: ...
    def every_name(self) -> Iterator[Resource]: ...
    def all_leases(self) -> Iterator[Grant]: ...
    def stop_sharing(self) -> None: ...
    def give_back_resting(self) -> bool: ...
    async def drained(self) -> None: ...


class Closing:
    """Ends a hub once, for the first reason that comes up."""

    def __init__(self, hub: ClosableHub, owned: OwnedClient | None) -> None:
        self.hub, self._owned = hub, owned
        self._task: asyncio.Task[None] | None = None
        self._client_is_closed = False
        self.on_close: Callable[[], None] | None = None
        """Function that is called when the hub can no longer be used; it may be called twice."""
        self._witness = CloseObserver(hub.servers.clients()[0], self._client_closes)
        self._unclosed = Unclosed(self, repr(hub), hub.link, owned)
        living[id(self)] = self

    async def close(self, drain: float) -> None:
        """Let bodies go on for ``drain`` seconds, then end what is left; see `Coordinator.aclose`."""
        hub = self.hub
        if hub.forked:
            hub.why_closed = hub.why_closed or "it was closed"
            return
        hub.check_context()
        try:
            if drain and hub.why_closed is None:
                await self.drain(drain)
        finally:
            await wait_shielded(self._start())  # bounded by `Hub.drained` and the close of connections

    def retire(self, why: str) -> None:
        """Close the hub in the background. From now on it refuses use, since locks remember it."""
        self.hub.why_closed = self.hub.why_closed or why
        self._tell()
        self._start()

    def _tell(self) -> None:
        if self.on_close is not None:
            self.on_close()

    def _start(self) -> asyncio.Task[None]:
        if self._task is None or self._task.cancelled():  # `asyncio.run` cancels all tasks at its end
            hub = self.hub
            hub.why_closed = hub.why_closed or "it was closed"
            hub.stop_sharing()
            begun.difference_update([one for one in list(begun) if one.hub.loop.is_closed()])  # cut off in the middle
            begun.add(self)
            # Not by the loop's factory: an eager task would end the loop's generator before it is known here.
            self._task = asyncio.Task(self._close(), loop=hub.loop, name="redis_sync_aio close")
        return self._task

    async def _close(self) -> None:
        hub = self.hub
        self._tell()
        self._end_all()
        await hub.manager.slices.done()
        hub.manager.stop()
        await hub.drained()
        await hub.executor.close()
        hub.observing.close()
        self._witness.leave()
        if self._client_is_closed:
            for client in hub.servers.clients():
                await close_idle(client)
        try:
            if self._owned is not None:
                await wait_shielded(self._owned.start_closing())
        finally:
            await self._unclosed.closed()
            begun.discard(self)

    async def drain(self, within: float, *, hold_back: bool = False) -> None:
        """End what waits, grant nothing, and wait until nothing is held, for ``within`` seconds at most.

        ``hold_back``: tasks that hold nothing get their errors at the end of that time.
        """
        hub, over = self.hub, asyncio.Event()
        emptied = hub.emptied = hub.emptied or asyncio.Event()  # others may drain it, too
        if hold_back:
            hub.held_back = partial(self._held_back, over)
        try:
            hub.stop_sharing()
            why = "the coordinator is being closed"
            hub.manager.slices.run(step for resource in hub.every_name() for step in resource.give_up(why))
            await hub.manager.slices.done()
            for lease in list(hub.all_leases()):
                if lease.ends_with_drain:
                    hub.manager.take_away(lease)
            hub.give_back_resting()
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    while hub.resources:
                        emptied.clear()
                        await emptied.wait()
        finally:
            over.set()

    async def _held_back(self, over: asyncio.Event) -> None:
        """Wait for the end of a drain, unless the current task holds something, which it could not release then."""
        task = asyncio.current_task()
        held = (grant for resource in self.hub.every_name() for grant in resource.held())
        if not any(grant.acquirer is not None and grant.acquirer() is task for grant in held):
            await over.wait()
            await asyncio.sleep(AFTER_DRAIN)

    def _end_all(self) -> None:
        hub = self.hub
        hub.manager.slices.stop()
        hub.manager.slices.run(self._give_up(f"the coordinator cannot be used any more: {hub.why_closed}"))

    def _give_up(self, why: str) -> Iterator[None]:
        """End all waits, and take all leases from their holders."""
        hub = self.hub
        for resource in hub.every_name():
            yield from resource.give_up(why)
            yield
        for lease in hub.all_leases():
            hub.manager.take_away(lease)
            yield

    # -- ends without a call of close --------------------------------------------------------------------

    async def loop_ends(self) -> None:
        """Close at the end of the event loop. Nothing runs after that, so finish a closing that has begun."""
        if self._task is not asyncio.current_task():  # otherwise that closing no longer needs the notice
            await self.close(0.0)

    def client_closed(self) -> None:
        """Close with the client, or its pool, which was closed."""
        hub = self.hub
        if hub.forked or hub.why_closed is not None or hub.loop is not running_loop():
            return
        self._client_is_closed = True
        self.retire("its client was closed (aclose(), or disconnect() of its pool); create a new client")
        self._end_all()

    def _client_closes(self) -> None:
        """Close with the client, unless a link is up: that notices it once its own connection is closed."""
        executor = self.hub.executor
        if executor.connections == 0 or executor.connection_error is not None:
            self.client_closed()

    def after_fork(self) -> None:
        """Leave everything to the parent process. The sockets are its own: never use or close them here."""
        self.hub.leave_to_parent()
        self._stop_at_once()
        self.hub.executor.after_fork()

    def close_without_loop(self) -> None:
        """Give up the connection, and the places in the client's pool: the event loop was closed without notice."""
        self.hub.why_closed = self.hub.why_closed or "its event loop was closed"
        self._stop_at_once()
        self.hub.observing.close()
        self.hub.executor.close_without_loop()

    def _stop_at_once(self) -> None:
        begun.discard(self)
        self._unclosed.forget()
        self.hub.stop_sharing()
        self.hub.manager.stop()
        self._witness.leave()
