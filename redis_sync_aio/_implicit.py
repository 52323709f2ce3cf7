"""The implicit coordinators: one per client and running event loop, for locks that were given a bare client.

It connects when first used, closes its connection when nothing was held, waited for or asked during `IDLE` seconds,
and otherwise when the event loop ends.
"""

from __future__ import annotations

import asyncio
import os

from redis.asyncio import Redis

from ._link.client import check_client, running_loop
from .coordinator import Coordinator, living

IDLE = 5.0
"""Seconds without any use after which an implicit coordinator closes."""

coordinators: dict[tuple[Redis, asyncio.AbstractEventLoop], Coordinator] = {}


def client_of(source: Redis | Coordinator) -> Redis:
    """Return the client of what a user gave; raise TypeError unless it is an asyncio client, or a coordinator."""
    if isinstance(source, Coordinator):
        return source.client
    check_client(source)
    return source


def coordinator_for(client: Redis | Coordinator) -> Coordinator:
    """Return ``client`` if it is a coordinator, else the implicit one of that client in the running loop.

    Raises if it can not be used here and now.
    """
    if isinstance(client, Coordinator):
        client.check()
        return client
    loop = running_loop()
    found = coordinators.get((client, loop))
    if found is None:
        for key in list(coordinators):  # a copy: other threads have loops and coordinators, too
            if key[1].is_closed():
                coordinators.pop(key, None)
        found = coordinators[client, loop] = Coordinator(client)
        found.on_close = lambda: _forget(client, loop)
        found.check()
        _close_when_idle(found, loop)
    return found


def _forget(client: Redis, loop: asyncio.AbstractEventLoop) -> None:
    coordinators.pop((client, loop), None)


def _close_when_idle(coordinator: Coordinator, loop: asyncio.AbstractEventLoop) -> None:
    number = coordinator.next_number()

    def look() -> None:
        if coordinator.why_closed is not None:
            return
        if coordinator.locals or coordinator.asking or coordinator.next_number() > number + 1:
            _close_when_idle(coordinator, loop)
        else:
            coordinator.retire("it was idle")

    loop.call_later(IDLE, look)


def _after_fork_in_child() -> None:
    coordinators.clear()
    for coordinator in list(living):
        coordinator.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
