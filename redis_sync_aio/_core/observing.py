"""Observers while they are attached: to one hub, or to all hubs of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeAlias
from weakref import WeakSet

from . import logs
from .arguments import require_function

if TYPE_CHECKING:
    from .events import Event
    from .observers import Observers

Observer: TypeAlias = "Callable[[Event], object]"
"""A function that is called with each event; its result is ignored. See `redis_sync_aio.instrumentation`."""
PatternOf: TypeAlias = Callable[[str], str | None]
"""A function that returns the pattern of a name, or None to leave that to others."""


class Attached:
    """An observer that is attached: to one coordinator, or to all. It can be closed, and is a context manager."""

    __slots__ = ("_failed", "_observer", "_on_close", "_pattern_of")

    def __init__(
        self,
        observer: Observer,
        pattern_of: PatternOf | None = None,
        on_close: Callable[[Attached], object] | None = None,
    ) -> None:
        """Attach ``observer``. `observe_all` and coordinators do that. Raises TypeError for a bad argument."""
        require_function(observer, "observer")
        if pattern_of is not None:
            require_function(pattern_of, "pattern_of")
        self._observer: Observer | None = observer
        self._pattern_of = pattern_of
        self._on_close = on_close
        self._failed = False

    def _take(self, event: Event) -> None:
        """Give ``event`` to the observer. Its first error is logged; errors change nothing else here."""
        if self._observer is None:
            return
        try:
            self._observer(event)
        except BaseException as error:
            self._report(error)

    def _pattern(self, name: str) -> str | None:
        """Return the pattern of ``name`` by the function that came with the observer."""
        if self._pattern_of is None or self._observer is None:
            return None
        try:
            pattern = self._pattern_of(name)
        except BaseException as error:
            self._report(error)
            return None
        return pattern if isinstance(pattern, str) else None

    def _report(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            logs.log("observer_failed", raised=error, observer=repr(self._observer))
        logs.raise_later(error)

    def close(self) -> None:
        """Stop calling the observer. Idempotent, in any thread. A call that has begun in another thread continues."""
        self._observer = None
        if self._on_close is not None:
            self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- The observers of a hub: its own, and those of all hubs of this process -----------------------------------------


_lock = threading.RLock()
_living: WeakSet[Observing] = WeakSet()
_everywhere: tuple[Attached, ...] = ()
"""Observers of all hubs."""


class Observing:
    """Keeps the observers of a hub, as they come and go."""

    observers: Observers | None = None
    """The observers of requests; None when there is none, so that no event is made for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Callable[[], str], own: tuple[Attached, ...]) -> None:
        """``own``: observers of this hub alone. ``server`` returns its address."""
        self._loop = loop
        self._server = server
        self._own = own
        self._made: Observers | None = None
        self._left = False
        with _lock:
            _living.add(self)
            self._refresh()

    def _refresh(self) -> None:
        """Let the hub have observers if there are any; in any thread, with the lock."""
        attached = (*self._own, *_everywhere)
        if self._left:
            return
        if attached and self._made is None:
            # Late: most processes observe nothing, and to make the classes of all events takes milliseconds.
            from .observers import Observers  # noqa: PLC0415

            self._made = Observers(self._server(), self._loop)
        if self._made is not None:
            self._made.attached = attached
        self.observers = self._made if attached else None

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
        if self._made is not None:
            self._made.close()

    def leave_to_parent(self) -> None:
        """Tell nothing any more in a forked child."""
        self._left = True
        if self._made is not None:
            self._made.leave_to_parent()
        self.observers = None


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
