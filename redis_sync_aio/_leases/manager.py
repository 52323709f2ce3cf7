"""The manager of one coordinator's grants: it renews them in batches, notices their end, and releases them.

There is one timer for all of them, not a task per lease. A tick looks at the leases that are due (`Schedule`) and
costs nothing for the others. It renews those whose time has come, all in the same turn of the loop and so in one write.
It loses those whose deadline has passed. A lease is due after a third of its time, and a tick takes along those that
are due soon after. Many are looked at by several ticks, with a pause after each.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from .._client.replies import Argument
from .._core import logs
from .._core.cancellation import outcome_of
from .._core.clock import SHORTEST, Stalls, now
from .._core.futures import Slices, finish
from .._core.keys import Keys
from .._engine.commands import Commands, Send
from .._scripts.constants import ReleaseReply
from .._transport.call import Call
from ..errors import SyncError, Unreachable
from .grant import Grant
from .renewals import Renewals
from .settings import LeaseState

if TYPE_CHECKING:
    from .._transport.call import Call
    from .grant import Grant
    from .hub import Hub

# -- Commands whose replies no task awaits; closing a coordinator waits for them -------------------------------


class InFlightCounter:
    """Counts releases and withdrawals in flight, so that a closing coordinator can wait for them."""

    _drained: asyncio.Event | None = None

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self.started: Callable[[Call], None] = self._calls.add
        """Count a call, which was sent."""

    def finished(self, call: Call) -> None:
        """Count ``call`` no longer: it was answered or given up."""
        self._calls.discard(call)
        if not self._calls and self._drained is not None:
            self._drained.set()

    async def drained(self, timeout: float) -> None:
        """Wait until all are answered, or the newest has had ``timeout`` seconds for that.

        A quarter of it passes in any case: an answer may have arrived while the event loop was blocked.
        """
        if self._calls:
            if self._drained is None or self._drained.is_set():  # else another task waits for it
                self._drained = asyncio.Event()
            newest = max(call.begun for call in self._calls)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(timeout / 4, newest + timeout - now())):
                    await self._drained.wait()


# -- When to look at which lease: those that are due are found without looking at the others -------------------
#
# A lease that ends, or is due sooner than before, leaves a stale entry behind, which does not keep it alive. Stale
# entries are dropped when they come up, or together by a look that finds many.


MAX_SLACK = 0.5
"""Seconds by which a lease is renewed early, at most, so that one write renews many."""
LEASES_PER_LOOK = 250
"""Most leases that one callback looks at."""
SECONDS_PER_LOOK = 0.015
"""Seconds after which a callback stops, even if it has looked at fewer."""
MOST_COLLECTED = 500
"""Most leases that one callback adds to the heap, or to the due ones."""
FEW_STALE = 1_000
"""Stale entries that are kept in any case."""

Entry: TypeAlias = tuple[float, int]
"""A time (local clock), and a number, which is stale if no lease has it."""


def slack(lease: Grant) -> float:
    """Return by how many seconds ``lease`` may be renewed early."""
    return min(MAX_SLACK, lease.period / 8)


class Schedule:
    """Leases by the time at which they are due, and due leases by their deadline: after a stall there may be many."""

    def __init__(self) -> None:
        self._new: dict[Grant, None] = {}  # entered of late: most end, or are renewed, before they are due
        self._new_due = math.inf  # not later than the first of these is due
        self._leases: dict[int, Grant] = {}  # by the numbers of their entries
        self._entries: list[Entry] = []  # a heap, by `Grant.due_at`
        self._due: list[Entry] = []  # a heap, by deadline, of those whose `Grant.due_at` is -inf
        self._next_number = itertools.count(1).__next__

    def enter(self, lease: Grant, when: float) -> bool:
        """Look at ``lease`` by ``when``; return True if that is sooner than before.

        A lease that is looked at too early is entered again.
        """
        if lease.due_at <= when:
            return False
        if lease.due_at == math.inf and len(self._new) < MOST_COLLECTED:
            self._new[lease] = None
            self._new_due = min(self._new_due, when)
        else:
            if lease.due_at < math.inf and self._new.pop(lease, self) is self:
                del self._leases[lease.entry]
            self._push(self._entries, when, lease)
        lease.due_at = when
        return True

    def leave(self, lease: Grant) -> None:
        """Stop looking at ``lease``."""
        if lease.due_at < math.inf:
            lease.due_at = math.inf
            if self._new.pop(lease, self) is self:
                del self._leases[lease.entry]

    def _push(self, heap: list[Entry], when: float, lease: Grant) -> None:
        lease.entry = number = self._next_number()
        self._leases[number] = lease
        heappush(heap, (when, number))

    def _drop_stale(self) -> None:
        for heap in (self._entries, self._due):
            heap[:] = [entry for entry in heap if entry[1] in self._leases]  # new entries would set off a collection
            heapify(heap)

    def next_due(self) -> float:
        """Return when to look next (local clock): -inf if a lease is due already, inf if there is none."""
        # Few enough that a look may drop them one by one, if they are the first.
        if len(self._entries) + len(self._due) - len(self._leases) > FEW_STALE + len(self._leases) // 8:
            self._drop_stale()
        if self.behind():
            return -math.inf
        if not self._new:
            self._new_due = math.inf
        return min(self._new_due, self._entries[0][0] if self._first(self._entries) is not None else math.inf)

    def _enter_new(self) -> None:
        for lease in self._new:
            self._push(self._entries, lease.due_at, lease)
        self._new.clear()
        self._new_due = math.inf

    def collect(self, time: float) -> None:
        """Move leases that are due at ``time`` to the due ones, and with them leases that may be renewed by then."""
        if self._new_due <= time + MAX_SLACK or len(self._new) == MOST_COLLECTED:
            self._enter_new()
        if self.next_due() > time:
            return
        for _ in range(MOST_COLLECTED):
            lease = self._first(self._entries)
            if lease is None:
                return
            when, number = self._entries[0]
            if when > time and (when >= lease.deadline or when - slack(lease) > time):
                return
            heappop(self._entries)
            del self._leases[number]
            lease.due_at = -math.inf
            self._push(self._due, lease.deadline, lease)

    def take(self) -> Grant | None:
        """Remove and return the due lease that ends first."""
        lease = self._first(self._due)
        if lease is not None:
            del self._leases[heappop(self._due)[1]]
            lease.due_at = math.inf
        return lease

    def behind(self) -> bool:
        """Return True if a due lease was not looked at yet."""
        return self._first(self._due) is not None

    def _first(self, heap: list[Entry]) -> Grant | None:
        """Return the lease of the first entry, after dropping stale ones; None if there is none."""
        while heap:
            lease = self._leases.get(heap[0][1])
            if lease is not None:
                return lease
            heappop(heap)
        return None


# -- Releases, which are sent when a grant is not needed any more, and what their answers mean -----------------


UNDO_FOR = 60.0
"""Seconds for which an undo is repeated at least, whatever ``retry_for`` is: it may be the only one left to do it."""


class Releases:
    """The releases of a coordinator's grants."""

    def __init__(self, hub: Hub) -> None:
        self.in_flight: InFlightCounter = InFlightCounter()
        self._hub = hub

    def release(self, lease: Grant) -> None:
        """Send the release of ``lease``, and repeat it until it is answered or the lease has expired."""
        time, pending, undoes = now(), lease.replayed, lease.terms.identity is not None
        call = Call(time, min(lease.deadline, time + self._hub.retry_for), self._answered)
        call.context = lease
        keys, token, release_args = lease.keys, lease.wire_token, lease.release_args()
        self._hub.commands.release(keys, token, call, pending=pending, release_args=release_args, undoes=undoes)
        # A command that is alone is on its way already (see `Connection`), so the rest adds no latency.
        self.in_flight.started(call)
        self._hub.forget_lease(lease)
        if (here := lease.same_identity) is not None:
            here.release_sent(lease.wire_token)

    def undo(
        self,
        keys: Keys,
        token: bytes,
        ticket: bytes = b"",
        *,
        pending: bool = False,
        release_args: tuple[Argument, ...] = (),
        done: Callable[[Call], None] | None = None,
    ) -> None:
        """Send a release that no task waits for; see `Resource.undo`. It is repeated for a minute at least."""

        def send(commands: Commands, call: Call) -> None:
            commands.release(
                keys, token, call, ticket=ticket, pending=pending, release_args=release_args, undoes=not pending
            )

        self.send(send, self._undone_by(), done)

    def undo_attach(self, keys: Keys, token: bytes, replaced: bytes, ttl_ms: int) -> None:
        """Let ``replaced`` hold again what was attached as ``token``, so that it may be attached again."""

        def send(commands: Commands, call: Call) -> None:
            commands.attach(keys, replaced, call, ttl_ms=ttl_ms, replaced=token, undoes=True)

        self.send(send, self._undone_by())

    def repeat_downgrade(self, lease: Grant) -> None:
        """Repeat the downgrade of ``lease``, whose renewals would otherwise keep the writer's permit, to its deadline.

        Not after its end: the same identity may have become the writer again.
        """
        if lease.state is LeaseState.HELD:
            self.send(
                lambda commands, call: commands.downgrade(lease.keys, lease.wire_token, call, undoes=True),
                lease.deadline,
            )

    def send(self, send: Send, expires: float, done: Callable[[Call], None] | None = None) -> Call:
        """Send a command, repeated until ``expires``, and call ``done`` with its answer.

        Closing the coordinator waits for it.
        """

        def answered(call: Call) -> None:
            self.in_flight.finished(call)
            if done is not None:
                done(call)

        call = Call(now(), expires, answered)
        send(self._hub.commands, call)
        self.in_flight.started(call)
        return call

    def _undone_by(self) -> float:
        return now() + max(self._hub.retry_for, UNDO_FOR)

    def _answered(self, call: Call) -> None:
        self.in_flight.finished(call)
        lease: Grant = call.context
        if (here := lease.same_identity) is not None:
            here.release_answered(lease.wire_token)
        plainly = call.reply == ReleaseReply.RELEASED and lease.state is LeaseState.RELEASING
        error = None if plainly else release_error(lease, call)
        lease.release_ended(error)
        if error is not None:
            notice_end(self._hub.loop, lease)


def release_error(lease: Grant, call: Call) -> SyncError | None:
    """Return why ``lease`` was not released, by the answer to its release. A lease that was gone is lost."""
    if lease.state is LeaseState.LOST:  # it was closed or found lost meanwhile
        return lease.loss()
    if call.error is not None:
        if isinstance(call.error, Unreachable) and now() >= lease.deadline:
            lease.lose("unreachable")
            return lease.loss()
        lease.release_uncertain |= call.attempts > 0 and (call.ambiguous or isinstance(call.error, Unreachable))
        return call.error
    found = call.reply  # a ReleaseReply
    # An earlier copy of this release may have been executed and its answer lost. Before our deadline only we can have
    # ended the lease, so that copy did (P4).
    if found == ReleaseReply.RELEASED or ((call.ambiguous or lease.release_uncertain) and call.sent < lease.deadline):
        return None
    lease.lose("expired" if found == ReleaseReply.GONE else "taken")
    return lease.loss()


def notice_end(loop: asyncio.AbstractEventLoop, lease: Grant) -> None:
    """Notice the end of a lease whose release failed. No tick looks at it, but a task may wait for its loss."""
    left = lease.deadline - now()
    if lease.state is not LeaseState.HELD:
        return
    if left <= 0:
        lease.lose("expired")
    elif left < math.inf:
        loop.call_later(left, notice_end, loop, lease)


MAX_TICK = 0.5
"""Most seconds between two ticks, so that a suspension of the machine is noticed soon after. It is less than the time
until a claim is renewed: most leases that are handed over end before the next tick."""
MIN_TICK = 0.005
"""Least seconds between two ticks, so that many different deadlines do not keep the loop busy."""


class GrantManager:
    """The manager of all grants of a coordinator; composes the timer, the renewals and the releases."""

    def __init__(self, hub: Hub) -> None:
        self.hub: Hub = hub
        self.loop: asyncio.AbstractEventLoop = hub.loop
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # local clock
        self._late = 0.0
        self._asleep = now() - self.loop.time()  # so far; the clock of the loop stops meanwhile
        self._stalls = Stalls(hub.stalled)
        self._schedule = Schedule()
        self.dismiss: Callable[[Grant], None] = self._schedule.leave
        """Stop looking at a grant."""
        self.slices: Slices = Slices(self.loop)
        self.renewals: Renewals = Renewals(hub, self)
        self.releases: Releases = Releases(hub)
        # Grants call these on the manager; the attributes save a call in between.
        self.extend: Callable[[Grant, int], Awaitable[None]] = self.renewals.extend
        self.release: Callable[[Grant], None] = self.releases.release

    def keep(self, lease: Grant) -> None:
        """Look at ``lease`` when it is due."""
        when = lease.deadline if lease.renewing else min(lease.renew_at, lease.deadline)
        if self._schedule.enter(lease, when) and when < self._tick_at:
            self._tick_in(when - now())

    def _tick_in(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._stalls.note(now(), now() - self._tick_at)  # it may be overdue
        delay = min(max(delay, MIN_TICK), MAX_TICK)
        self._tick_at = now() + delay
        self._timer = self.loop.call_later(delay, self._tick)

    def stop(self) -> None:
        """Stop the timer."""
        self.slices.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        begun, schedule = now(), self._schedule
        late = begun - self._tick_at
        self._stalls.note(begun, late)
        self._late = max(self._late if schedule.behind() else 0.0, late)
        asleep, self._asleep = self._asleep, begun - self.loop.time()
        if self._asleep - asleep >= SHORTEST:  # the timers of shares do not count that time
            self.slices.run(self._look_at_shares())
        self._timer, self._tick_at = None, math.inf
        schedule.collect(begun)
        time, left = begun, LEASES_PER_LOOK
        try:
            while left and time < begun + SECONDS_PER_LOOK and (lease := schedule.take()) is not None:
                self._look_at(lease, time)
                time, left = now(), left - 1
        finally:
            self._stalls.note(time, time - begun)
            if (next_due := schedule.next_due()) < math.inf:
                self._tick_in(next_due - time)

    def _look_at(self, lease: Grant, time: float) -> None:
        """Renew ``lease`` if it is due; lose it if its deadline has passed."""
        lease.look_at_shares(time)
        if lease.state is not LeaseState.HELD or not self.hub.keeps(lease):
            return
        if time >= lease.deadline:
            # A renewal in flight was sent in good time, so the server was unreachable, unless it refused (`cause_of`).
            lease.lose("unreachable" if lease.renewing else "expired")
            return
        if not lease.renewing and time >= lease.renew_at - slack(lease):
            if self._late > lease.period / 3:
                self._report_late(lease)
            if lease.drop_forgotten():
                return
            self.renewals.renew_if_due(lease)
        self.keep(lease)

    def _report_late(self, lease: Grant) -> None:
        """Tell the log, and observers, that ``lease`` is renewed late."""
        left, observation = lease.remaining(), lease.observed()
        logs.renewal_late(lease.name, self._late, left, lease.period, lease.claim, observation)
        if observation is not None:
            observation.renewed_late(self._late, left)

    def _look_at_shares(self) -> Iterator[None]:
        for lease in self.hub.all_leases():
            lease.look_at_shares(now())
            yield

    def stalled_since(self, time: float) -> float:
        """Return how many seconds, at least, the event loop was blocked since ``time`` (local clock)."""
        return self._stalls.since(time) + (max(0.0, now() - self._tick_at) if self._timer else 0.0)

    # -- for grants ------------------------------------------------------------------------------------

    def forget(self, lease: Grant) -> None:
        """Let go of ``lease``, which is lost."""
        self.hub.forget_lease(lease)
        perhaps = lease.outlasts or self.renewals.may_be_prolonged(lease)
        if lease.reason != "closed" and lease.terms.identity is None and perhaps:
            # It is lost here, but the server may have prolonged it, or may still do so. Others would wait for nothing.
            self.releases.undo(lease.keys, lease.wire_token, pending=lease.replayed, release_args=lease.release_args())

    def take_away(self, lease: Grant) -> None:
        """Take ``lease`` from its holder, because the coordinator is closed, and release it."""
        self.release(lease)
        lease.lose("closed")

    def let_go(self, lease: Grant) -> None:
        """Forget ``lease``, which lasts without this process."""
        lease.state = LeaseState.RELEASED
        self.hub.forget_lease(lease)
        lease.notify_ended()

    async def ask(
        self, lease: Grant, send: Send, answered: Callable[[Call], SyncError | None], by: float = math.inf
    ) -> None:
        """Send a command about ``lease``; raise the error that ``answered`` makes of its answer.

        It is repeated as by `send`. After a cancellation it is finished in the background.
        """
        outcome: asyncio.Future[None] = self.loop.create_future()

        def done(call: Call) -> None:
            finish(outcome, None, answered(call))

        self.send(lease, send, done, by)
        await outcome_of(outcome)

    def send(self, lease: Grant, send: Send, done: Callable[[Call], None], by: float = math.inf) -> Call:
        """Send a command about ``lease``, and call ``done`` with its answer; closing the coordinator waits for it.

        It is repeated until the deadline, or until ``by`` (local clock).
        """
        expires = min(lease.deadline, now() + self.hub.retry_for, by)
        return self.releases.send(send, expires, done)
