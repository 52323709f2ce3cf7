"""Waits: checks of a name that this process waits for, and reports about waits that are long or have ended.

Waiters need no timer of their own. While a task waits for a name, its `Waits` look at all waiters every few seconds.

A key without a ttl may be application data. The reply to an acquire does not show that, so the key is read once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from .._core import logs
from .._core.clock import EARLY, now
from .._core.display import shown, text
from .._core.keys import KINDS, READ_WRITE, PermitKeys
from .._scripts.constants import WRITER_WEIGHT, Look, stated_limit
from .._transport.call import Call
from ..errors import AcquireTimeout, WaitTimeout
from ..errors._base import RELEASE_TO_WRITE, held_elsewhere, held_here, no_answer, time_allowed

if TYPE_CHECKING:
    from .._inspection.views import NameView
    from .acquisition import Acquisition
    from .grant import Grant
    from .hub import Hub
    from .resource import Resource

Waiter: TypeAlias = "asyncio.Future[Any]"
"""The receiver that a task awaits until it has a grant."""

LONG = 10.0
"""Seconds after which a wait is logged."""
EVERY = 2.5
"""Seconds between two looks at the waiters."""
SILENCE = 60.0
"""Seconds between two log lines about one name."""
LAST_LOOK = 0.25
"""Seconds within which a question at the end of a timeout has to be answered."""
LISTED = 5
HOLDERS = 1000
"""Most readers among which that of the waiting task is found."""


class Waits:
    """The waits of this process for one name. It exists while a task waits."""

    data: str | None = None
    """Description of a lock's key that this package did not write and that has no ttl."""
    held_by: str = ""
    """The holders, as the server has just told them, while errors of waiters whose time is up are made."""
    paused: bool = False
    """True if the limit was 0 when the server told the holders."""
    _late: asyncio.TimerHandle | None = None
    _asked = False
    _quiet_until = -math.inf

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._timer = resource.hub.loop.call_later(EVERY, self._look)
        self._timed_out: list[Callable[[], None]] = []  # functions to call when the holders are known

    def end(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def endless(self) -> None:
        """Ask the server once for the value of a key that has no ttl."""
        if not self._asked and not isinstance(self._resource.keys, PermitKeys):
            self._asked = True
            self._inspect(self._found_endless)

    def _found_endless(self, view: NameView | None) -> None:
        if view is not None:
            self.data = data_in(view)

    def ask_holders(self, then: Callable[[], None]) -> None:
        """Ask for the holders, since a waiter's time is up, and call ``then`` after the answer, or soon without one.

        One question serves all whose time ends until it is answered.
        """
        self._timed_out.append(then)
        if len(self._timed_out) == 1:
            self._late = self._resource.hub.loop.call_later(LAST_LOOK, self._tell_holders, "")
            self._inspect(self._found_holders, shown=LISTED + 1)

    def _found_holders(self, view: NameView | None) -> None:
        # It may be late, and the answer to an earlier question: then it serves those whose time is up now.
        self.paused = view is not None and view.limit == 0
        self._tell_holders("" if view is None else _described(view))

    def _tell_holders(self, held_by: str) -> None:
        if self._late is not None:
            self._late.cancel()
        self.held_by = held_by
        waiters, self._timed_out = self._timed_out, []
        for then in waiters:
            then()
        self.held_by, self.paused = "", False

    def find_deadlock(self) -> None:
        """End the wait of a task for itself: a body of it holds the same by another client, coordinator or engine.

        Whether it is the same is for the server to say: it has the token of that lease.
        """
        keys = self._resource.keys
        if isinstance(keys, PermitKeys) and keys.kind is not READ_WRITE:
            return  # the limit of a semaphore may grow
        bodies = [(it, task) for it in self._resource.hub.held_elsewhere(self._resource) for task in it.bodies()]
        if not bodies:
            return
        waiters = dict(self._resource.waiters())
        found = [
            (waiter, lease, task) for lease, task in bodies if (waiter := getattr(task, "_fut_waiter", None)) in waiters
        ]
        if found:
            self._inspect(partial(self._found_deadlock, found), shown=HOLDERS)

    def _found_deadlock(self, found: list[tuple[Waiter, Grant, asyncio.Task[object]]], view: NameView | None) -> None:
        tokens = set() if view is None else {it.token for it in view.holders}
        for waiter, lease, task in found:
            if text(lease.wire_token) in tokens and not waiter.done():
                self._resource.refuse_deadlock(waiter, lease, task)

    def _look(self) -> None:
        first, time = min((begun for _, begun in self._resource.waiters()), default=None), now()
        if first is None:
            self._resource.waits = None
            return
        self._timer = self._resource.hub.loop.call_later(EVERY, self._look)
        self.find_deadlock()
        if time - first >= LONG and time >= self._quiet_until:
            self._quiet_until = time + SILENCE
            self._inspect(self._report)

    def _inspect(self, done: Callable[[NameView | None], None], shown: int = LISTED) -> None:
        """Read the name, and call ``done`` with a view without details; None: Redis did not answer, or refused."""
        from .._inspection.reading import brief_view, reading_of  # noqa: PLC0415

        resource, time = self._resource, now()
        reading = reading_of(resource.keys, shown)

        def answered(call: Call) -> None:
            done(None if call.error is not None else brief_view(reading, call.reply))

        call = Call(time, time + resource.hub.retry_for, answered)
        resource.hub.commands.read(reading.keys, reading.first_asked(0), call)

    def _report(self, view: NameView | None) -> None:
        resource = self._resource
        waiters = dict(resource.waiters())
        waited = now() - min(waiters.values(), default=math.inf)
        if waited < LONG:
            return
        holding = [task for lease in resource.leases if lease.acquirer and (task := lease.acquirer()) is not None]
        itself = any(getattr(task, "_fut_waiter", None) in waiters for task in holding)
        waiting, holder = len(waiters), "its holder is not known, as Redis did not answer"
        if view is not None:
            waiting, holder = max(waiting, view.waiting), KINDS[view.kind].closed or _holders(view)
        if resource.leases:
            names = ", ".join(sorted({task.get_name() for task in holding})[:LISTED]) or "no living task"
            holder += f"; of this process: {names}"
        logs.log(
            "waiting_long",
            lock=resource.name,
            seconds=waited,
            holder=holder,
            waiting=waiting,
            itself=itself,
            advice="A task that holds it waits for it as well: it waits for itself. " if itself else "",
        )


def _described(view: NameView) -> str:
    """Return the holders that a view lists, as people know them; empty if there is none."""
    found: dict[str, None] = {}
    for it in view.holders[:LISTED]:
        process = f"{it.host}:{it.pid}"
        name = "" if it.label == process else f" {shown(it.label)}"
        found[shown(it.token) if it.host is None else process + name] = None
    return ", ".join(found) + (" and others" if len(view.holders) > LISTED else "")


def _holders(view: NameView) -> str:
    """Return the holders of a lock, a semaphore or a read/write lock, in words."""
    tokens = ", ".join(shown(it.token) for it in view.holders)
    if view.kind == "semaphore":
        by = f", by {tokens}" if tokens else ""
        if view.limit == 0:
            return f"its limit is 0 (paused), and {view.held} permits are held{by}"
        return f"{view.held} of its {view.limit} permits {'is' if view.held == 1 else 'are'} held{by}"
    if not tokens:
        return "it is free at this moment"
    if view.kind == "read_write":
        return f"{tokens} {'writes' if any(it.access == 'write' for it in view.holders) else 'read'}"
    left = view.holders[0].remaining
    return f"{tokens} holds it {'without a ttl' if left is None else f'for {left:.1f} seconds more unless it renews'}"


def data_in(view: NameView) -> str | None:
    """Describe a lock's key if it has no ttl and this package did not write it."""
    return next((it.meaning for it in view.problems if it.code == "foreign_without_ttl"), None)


def timeout_error(
    resource: Resource, within: float | None, weight: int, permits: int, answered: bool = True
) -> AcquireTimeout | WaitTimeout:
    """Return the error for a request that waited ``within`` seconds because others have it, as was ``answered``.

    ``weight`` and ``permits``: what was asked for, as `Request.weight` and `Request.limit`.
    """
    if closed := resource.keys.kind.closed:
        return WaitTimeout(name=resource.name, within=within, answered=answered, closed=closed)
    name, waits, own = resource.name, resource.waits, sum(lease.weight for lease in resource.leases)
    held_by = "" if waits is None else waits.held_by
    if weight and permits != WRITER_WEIGHT:
        limit = stated_limit(permits)  # the server may have another one than 0
        failed = f"did not have {weight} of its {f'{limit} ' if limit else ''}permits free"
        them, mine, use = "them", f"{own} of them", ""
    else:
        failed, them, mine, use = "was not free", "it", "it", "use AsyncReentrantLock"
        if isinstance(resource.keys, PermitKeys):
            use = RELEASE_TO_WRITE if weight == WRITER_WEIGHT > own else "go on with that lease"
    if not answered:
        failed, why = "was not granted", no_answer(name)
    elif waits is not None and waits.paused:
        failed, why = "was not granted", "it is paused by a limit of 0, until resize() raises it"
    elif own:
        why = held_here(mine, use)
    else:
        why = (None if waits is None else waits.data) or held_elsewhere(them, held_by)
    return AcquireTimeout(
        f"{name!r} {failed}{time_allowed(within)}: {why}",
        name=name,
        remaining=resource.holder_remaining(),
        answered=answered,
        held_by=held_by,
    )


# -- Checks of a name that this process waits for (P3) ---------------------------------------------------------
#
# A wake-up may be lost with its connection, a holder may die, and other clients may delete the key or change its
# expiry. So the server is asked again when the present holder's lease should have ended, and every few seconds. One
# look per name is enough, since every script settles the whole queue: the oldest acquisition repeats its request,
# which changes nothing if nothing happened. When the answer shows that the queue was lost, all other acquisitions
# repeat theirs.
#
# Each process looks as often, wherever it stands: a queue of 10,000 may be served within two seconds, so a place far
# behind is no reason to miss one's grant. It would take another command to know it.


class Healing:
    """The next look at one name: when it is due, and which acquisitions ask."""

    __slots__ = ("_acquisitions", "_due", "_fires_at", "_hub", "_last", "_polls", "_timer", "look_every")

    def __init__(self, hub: Hub, acquisitions: Mapping[int, Acquisition]) -> None:
        self._hub = hub
        self._acquisitions = acquisitions
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # local clock
        self._fires_at = 0.0  # when the timer fires; at the latest when a look is due
        self.look_every = hub.options.poll_cap  # seconds between two looks, while there are acquisitions
        self._polls: Iterator[float] | None = None
        self._last: list[Callable[[], None]] = []  # functions to call after the answer to the present look

    @property
    def planned(self) -> bool:
        """True if there is a next look."""
        return self._timer is not None

    def queued(self, left: float | None, look: int) -> None:
        """Plan the next look, after an answer: the holder's lease ends in ``left`` seconds; ``look`` is a `Look`."""
        delay = self.look_every
        if look in (Look.SOON, Look.LATER) or not self._hub.pushes:  # no push will wake us: poll, with back-off
            if self._polls is None:
                self._polls = iter(self._hub.options.poll)
            delay = min(delay, next(self._polls, self._hub.options.poll.cap))
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
        self._polls, self.look_every = None, self._hub.options.poll_cap
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
