"""Which observers a hub has: those of its own, and those of all hubs of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from weakref import ReferenceType, WeakSet, ref

from .attached import Attached, Observer, PatternOf

if TYPE_CHECKING:
    from .observers import Observers

_lock = threading.RLock()
_living: WeakSet[Observing] = WeakSet()
_everywhere: tuple[Attached, ...] = ()
"""Observers of all hubs."""


class ObservedHub(Protocol):
    """A hub, as its observing knows it."""

    observers: Observers | None
    loop: asyncio.AbstractEventLoop


class Observing:
    """Gives a hub its observers, and takes them away, as they come and go."""

    def __init__(self, hub: ObservedHub, server: Callable[[], str], own: tuple[Attached, ...]) -> None:
        """``own``: observers of this hub alone. ``server`` returns its address."""
        self._hub: ReferenceType[ObservedHub] = ref(hub)
        self._server = server
        self._own = own
        self._observers: Observers | None = None
        self._left = False
        with _lock:
            _living.add(self)
            self._refresh()

    def _refresh(self) -> None:
        """Let the hub have observers if there are any; in any thread, with the lock."""
        hub, attached = self._hub(), (*self._own, *_everywhere)
        if hub is None or self._left:
            return
        if attached and self._observers is None:
            # Late: most processes observe nothing, and to make the classes of all events takes milliseconds.
            from .observers import Observers  # noqa: PLC0415

            self._observers = Observers(self._server(), hub.loop)
        if self._observers is not None:
            self._observers.attached = attached
        hub.observers = self._observers if attached else None

    def attach(self, observer: Observer) -> Attached:
        """Call ``observer`` with the events of this hub, from now on until it is closed."""
        attached = Attached(observer, None, self._detach)
        with _lock:
            self._own = (*self._own, attached)
            self._refresh()
        return attached

    def _detach(self, attached: Attached) -> None:
        with _lock:
            self._own = tuple(other for other in self._own if other is not attached)
            self._refresh()

    def close(self) -> None:
        """Tell the end of all leases that have none: the hub is closed."""
        if self._observers is not None:
            self._observers.close()

    def leave_to_parent(self) -> None:
        """Tell nothing any more in a forked child."""
        self._left = True
        if self._observers is not None:
            self._observers.leave_to_parent()
        if (hub := self._hub()) is not None:
            hub.observers = None


def observe_all(observer: Observer, *, pattern_of: PatternOf | None = None) -> Attached:
    """Call ``observer`` with the events of all coordinators of this process; see `redis_sync_aio.instrumentation`."""
    global _everywhere
    attached = Attached(observer, pattern_of, _detach)
    with _lock:
        _everywhere = (*_everywhere, attached)
        _refresh_all()
    return attached


def _detach(attached: Attached) -> None:
    global _everywhere
    with _lock:
        _everywhere = tuple(other for other in _everywhere if other is not attached)
        _refresh_all()


def _refresh_all() -> None:
    for observing in list(_living):
        observing._refresh()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have it


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
