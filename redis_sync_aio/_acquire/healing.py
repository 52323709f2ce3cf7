"""Checks of a name that this process waits for (P3).

A wake-up may be lost with its connection, a holder may die, and other clients may delete the key or change its expiry.
So the server is asked again when the present holder's lease should have ended, and every few seconds. One look per
name is enough, since every script settles the whole queue: the oldest acquisition repeats its request, which changes
nothing if nothing happened. When the answer shows that the queue was lost, all other acquisitions repeat theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from .._core.backoff import Backoff
from .._core.clock import EARLY, now
from .._scripts.constants import Look
from .._transport.call import Call
from .waits import LAST_LOOK


class HealingHub(Protocol):
    """The hub, as looks know it."""

    loop: asyncio.AbstractEventLoop
    pushes: bool
    poll_ms: int
    claim_ms: int
    poll_cap: float
    poll: Backoff


class Asker(Protocol):
    """An acquisition, as looks know it."""

    call: Call | None
    sent: float
    withdrawn: bool

    def ask(self) -> None: ...


class Healing:
    """The next look at one name: when it is due, and which acquisitions ask."""

    __slots__ = ("_acquisitions", "_due", "_fires_at", "_hub", "_last", "_polls", "_timer", "look_every")

    def __init__(self, hub: HealingHub, acquisitions: Mapping[int, Asker]) -> None:
        self._hub = hub
        self._acquisitions = acquisitions
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # local clock
        self._fires_at = 0.0  # when the timer fires; at the latest when a look is due
        self.look_every = hub.poll_cap  # seconds between two looks, while there are acquisitions
        self._polls: Iterator[float] | None = None
        self._last: list[Callable[[], None]] = []  # functions to call after the answer to the present look

    @property
    def planned(self) -> bool:
        """Whether there is a next look."""
        return self._timer is not None

    def queued(self, left: float | None, look: int) -> None:
        """Plan the next look, after an answer: the holder's lease ends in ``left`` seconds; ``look`` is a `Look`."""
        delay = self.look_every
        if look == Look.SOON or not self._hub.pushes:  # no push will wake us: poll, with back-off
            if self._polls is None:
                self._polls = iter(self._hub.poll)
            delay = min(delay, next(self._polls, self._hub.poll.cap))
        else:
            self._polls = None
            if look == Look.IN_TIME:
                delay = min(delay, self._hub.claim_ms / 1000)
        self.look_in(delay if left is None else min(left + EARLY, delay))
        self._looked()

    def announced(self, until: float) -> None:
        """Look when the present holder's lease ends, at ``until`` (local clock)."""
        self._polls = None
        self.look_in(min(max(until - now(), 0.0) + EARLY, self.look_every))

    def look_last(self, then: Callable[[], None]) -> None:
        """Look once more at the end of a timeout, and call ``then`` when that was answered.

        It asks only where no push wakes the waiters: they poll, or are behind a holder that knows no queue. Otherwise
        it calls ``then`` immediately.
        """
        if self._polls is None:
            then()
            return
        if not self._last:
            self._hub.loop.call_later(LAST_LOOK, self._looked)
        self._last.append(then)
        self.look_in(0.0)

    def _looked(self) -> None:
        last, self._last = self._last, []
        for then in last:
            then()

    def look_in(self, delay: float) -> None:
        """Look after ``delay`` seconds instead of at the planned time."""
        self._due = now() + delay
        if self._timer is not None:
            if self._fires_at <= self._due:
                return  # the timer finds that it is too early, and waits on
            self._timer.cancel()
        self._fires_at = self._due
        self._timer = self._hub.loop.call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        early = self._due - now()
        if early > EARLY / 2:  # a look before the key has expired would be wasted
            self.look_in(early)
            return
        oldest = True
        for acquisition in list(self._acquisitions.values()):
            if acquisition.withdrawn:
                continue
            # Without pushes a ticket also has to be kept alive on the server.
            if acquisition.call is None and (oldest or now() - acquisition.sent > self._hub.poll_ms / 3000):
                acquisition.ask()
            oldest = False
            if self._hub.pushes:
                return

    def stop(self) -> None:
        """Stop looking."""
        self._polls, self.look_every = None, self._hub.poll_cap
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
