"""When to look at which lease: those that are due are found without looking at the others.

Leases that are due close together form a batch, so that one look renews them with one write. How close depends on the
slack of each: a lease of half a minute may be renewed half a second early, one of 30 milliseconds may not. So batches
of similar slack form a row, which is a grid over time. Short leases have a row of their own, and are looked at first.

A lease that ends leaves its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .grant import Grant

FINEST, COARSEST = -10, -2
"""Exponents: batches are between a millisecond and a quarter of a second wide."""
MAX_SLACK = 0.5
"""Seconds by which a lease is looked at early, at most."""
LEASES_PER_LOOK = 250
"""Most leases that one callback looks at."""
SECONDS_PER_LOOK = 0.015
"""Seconds after which a callback stops, even if it has looked at fewer."""


class Batch(dict["Grant", None]):
    """Leases that are due at about the same time."""

    __slots__ = ("first",)

    def __init__(self, first: float) -> None:
        """Make an empty batch; ``first`` is when the first of its leases is due (local clock)."""
        super().__init__()
        self.first = first


class Row:
    """Batches of one width, by their place on the grid."""

    __slots__ = ("_batches", "_places", "_width")

    def __init__(self, width: float) -> None:
        self._width = width
        self._batches: dict[int, Batch] = {}
        self._places: list[int] = []  # a heap

    def batch(self, when: float) -> Batch:
        """Return the batch for what is due at ``when``."""
        place = math.floor(when / self._width)
        batch = self._batches.get(place)
        if batch is None:
            batch = self._batches[place] = Batch(when)
            heappush(self._places, place)
        elif when < batch.first:
            batch.first = when
        return batch

    def next_due(self) -> float:
        """Return when the first batch is due; inf when there is none."""
        places, batches = self._places, self._batches
        while places:
            batch = batches[places[0]]
            if batch:
                return batch.first
            del batches[heappop(places)]
        return math.inf

    def due(self, time: float) -> Iterator[Batch]:
        """Take the batches that are due at ``time``, and those that are due soon after."""
        while self.next_due() <= time:
            yield self._take()
            while self._places and self._places[0] * self._width <= time + self._width:
                yield self._take()

    def _take(self) -> Batch:
        return self._batches.pop(heappop(self._places))


class Schedule:
    """Leases by the time at which they are due."""

    def __init__(self) -> None:
        self.put_off: dict[Grant, None] = {}
        """Granted since the latest look and not due before the next. Most end before that, and are never entered."""
        self._rows: dict[int, Row] = {}
        self._batch_of: dict[Grant, Batch] = {}
        self._ended = Batch(-math.inf)
        """Due leases whose deadline has passed."""
        self._due: dict[int, list[Batch]] = {}  # by row
        self._behind_since = 0.0

    def enter(self, lease: Grant, when: float, slack: float) -> bool:
        """Look at ``lease`` by ``when``, at most ``slack`` seconds earlier; return whether that is new."""
        batch = self._batch_of.get(lease)
        if batch is not None:
            if batch.first <= when:
                return False  # a lease that is looked at too early is entered again
            del batch[lease]
        exponent = math.frexp(min(slack, MAX_SLACK))[1] - 2 if slack > 0 else FINEST  # half the slack, or less
        width = min(max(exponent, FINEST), COARSEST)
        row = self._rows.get(width)
        if row is None:
            row = self._rows[width] = Row(2.0**width)
        batch = self._batch_of[lease] = row.batch(when)
        batch[lease] = None
        return True

    def leave(self, lease: Grant) -> None:
        """Stop looking at ``lease``."""
        if self.put_off.pop(lease, self) is None:
            return
        batch = self._batch_of.pop(lease, None)
        if batch is not None:
            del batch[lease]

    def next_due(self) -> float:
        """Return when to look next (local clock); inf if nothing is due."""
        return min((row.next_due() for row in self._rows.values()), default=math.inf)

    def collect(self, time: float) -> None:
        """Move what is due at ``time`` to the due leases."""
        if not self._due:
            self._behind_since = time
        for width, row in self._rows.items():
            for batch in list(row.due(time)):
                batch.first = -math.inf
                for lease in [lease for lease in batch if lease.deadline <= time]:
                    del batch[lease]
                    self._ended[lease] = None
                    self._batch_of[lease] = self._ended
                self._due.setdefault(width, []).insert(0, batch)

    def take(self) -> Grant | None:
        """Remove and return a due lease: first those that have ended, then the shortest."""
        batch = self._first_due()
        if batch is None:
            return None
        lease, _ = batch.popitem()
        del self._batch_of[lease]
        return lease

    def _first_due(self) -> Batch | None:
        if self._ended:
            return self._ended
        while self._due:
            width = min(self._due)
            batches = self._due[width]
            while batches:
                if batches[-1]:
                    return batches[-1]
                batches.pop()
            del self._due[width]
        return None

    @property
    def behind(self) -> bool:
        """Whether there are due leases that were not looked at yet."""
        return self._first_due() is not None

    def in_time(self, time: float) -> bool:
        """Return whether there is time for a pause, by the slack of all due leases."""
        return not self._ended and bool(self._due) and time - self._behind_since < 2.0 ** (min(self._due) + 1)
