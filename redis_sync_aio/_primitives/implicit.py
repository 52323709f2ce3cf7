"""The implicit coordinators: one per client and running event loop, for locks that were given a bare client.

It connects when first used, closes its connection when nothing was held, waited for or asked during `IDLE` seconds,
and otherwise when the event loop ends.
"""

from __future__ import annotations

import os

from .._client.settings import Client, check_client, running_loop
from ..coordinator import Coordinator, living

IDLE = 5.0
"""Seconds without any use after which an implicit coordinator closes."""

coordinators: dict[tuple[int, int], Coordinator] = {}
"""By the ids of client and loop, which they keep alive. (Clients may be equal, or not hashable.)"""


def client_of(source: Client | Coordinator) -> Client:
    """Return the client of what a user gave; raise TypeError unless it is an asyncio client, or a coordinator."""
    if isinstance(source, Coordinator):
        return source.client
    check_client(source)
    return source


def coordinator_for(client: Client | Coordinator) -> Coordinator:
    """Return ``client`` if it is a coordinator, else the implicit one of that client in the running loop.

    Raises if it can not be used here and now.
    """
    if isinstance(client, Coordinator):
        client.check()
        return client
    loop = running_loop()
    found = coordinators.get((id(client), id(loop)))
    if found is None:
        _bury_the_dead()
        found = Coordinator(client)
        found.check()
        coordinators[id(client), id(loop)] = found
        _Idle(client, found)
    return found


def _bury_the_dead() -> None:
    """End those whose loop was closed by itself, not by `asyncio.run` or another that lets generators end before."""
    for key, found in list(coordinators.items()):  # a copy: other threads have loops and coordinators, too
        if found.loop.is_closed() and (dead := coordinators.pop(key, None)) is not None:
            dead.close_without_loop()


class _Idle:
    """Closes a coordinator when it was not used for a while."""

    def __init__(self, client: Client, coordinator: Coordinator) -> None:
        self._key = id(client), id(coordinator.loop)
        self._coordinator = coordinator
        coordinator.on_close = self._closed
        self._look_later()

    def _look_later(self) -> None:
        self._number = self._coordinator.next_number()
        self._timer = self._coordinator.loop.call_later(IDLE, self._look)

    def _look(self) -> None:
        _bury_the_dead()
        coordinator = self._coordinator
        if coordinator.resources or coordinator.asking or coordinator.next_number() > self._number + 1:
            self._look_later()
        else:
            coordinator.retire("it was idle")

    def _closed(self) -> None:
        self._timer.cancel()  # it would keep the coordinator and its client for that long
        if coordinators.get(self._key) is self._coordinator:  # closing tells it twice, and there may be another by then
            del coordinators[self._key]


def _after_fork_in_child() -> None:
    coordinators.clear()
    for coordinator in list(living):
        coordinator.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
