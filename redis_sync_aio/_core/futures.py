"""Waiting and working in one event loop: receivers of outcomes, work in slices, one call for all callers of a key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol, TypeVar

from .clock import now

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class FutureLike(Protocol[T_contra]):
    """A receiver of one result or one error, unless it is done already."""

    def done(self) -> bool: ...
    def set_result(self, result: T_contra, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


def finish(outcome: FutureLike[T], result: T, error: Exception | None) -> None:
    """Finish ``outcome`` with ``error`` if there is one, else with ``result``; do nothing if it is done."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)


# -- Long work in slices, between which the event loop keeps running -------------------------------------------------


SLICE = 0.005
"""Seconds that one callback works, about."""


class Slices:
    """Runs iterators in one event loop, one behind the other. Each of their steps is short."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._works: deque[Iterator[object]] = deque()
        self._next: asyncio.Handle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def run(self, work: Iterator[object]) -> None:
        """Begin with ``work`` now, unless other work is before it, and go on in later turns of the loop."""
        self._works.append(work)
        if self._next is None:
            self._go_on()

    def _go_on(self) -> None:
        self._next = self._loop.call_soon(self._go_on)  # first: a step may raise
        works, end = self._works, now() + SLICE
        while works:
            for _ in works[0]:
                if now() >= end:
                    return
            works.popleft()
        self.stop()

    async def done(self) -> None:
        """Wait until all is done, or dropped."""
        if self._works:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def stop(self) -> None:
        """Drop the rest."""
        self._works.clear()
        for waiter in self._waiters:
            finish(waiter, None, None)
        self._waiters.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None


# -- A call that works for all calls of this process with the same key: the others wait for what it finds ------


class Flight:
    """The call of one task, its leader, and the news that it has for the others."""

    def __init__(self) -> None:
        self.leader: asyncio.Task[object] | None = asyncio.current_task()
        self._news: bytes | None = None
        self._told = self._new_future()

    def tell(self, news: bytes | None = None) -> None:
        """Wake the others with ``news``; None: with the latest, as the leader leaves."""
        self._news = self._news if news is None else news
        told, self._told = self._told, self._new_future()
        told.set_result(None)

    async def next(self, seen: bytes | None, timeout: float | None) -> bytes | None:
        """Return the news when they are other than ``seen``, when the leader leaves, or after ``timeout`` seconds.

        Safe to cancel.
        """
        if self._news is None or self._news == seen:
            await asyncio.wait([self._told], timeout=timeout)
        return self._news

    @staticmethod
    def _new_future() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
