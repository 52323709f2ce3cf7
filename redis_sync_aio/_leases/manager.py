"""The manager of one coordinator's grants: it renews them in batches, notices their end, and releases them.

There is one timer for all of them, not a task per lease. A tick looks at the leases that are due
(`_leases/schedule.py`) and costs nothing for the others. It renews those whose time has come, all in the same turn of
the loop and so in one write. It loses those whose deadline has passed. A lease is due after a third of its time, and a
tick takes along those that are due soon after. Many are looked at in slices, with a pause after each slice while there
is time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator

from .._core import logs
from .._core.cancellation import outcome_of
from .._core.clock import now
from .._core.keys import Keys
from .._core.slices import Slices
from .._core.stalls import SHORTEST, Stalls
from .._engine.commands import Commands, Delivery, Send
from .._transport.call import Call
from ..errors import SyncError
from .grant import Grant
from .releases import Releases
from .renewals import Renewals
from .schedule import LEASES_PER_LOOK, MAX_SLACK, SECONDS_PER_LOOK, Schedule
from .settings import LeaseSettings
from .terms import LeaseState

MAX_TICK = 0.5
"""Most seconds between two ticks, so that a suspension of the machine is noticed soon after. It is less than the time
until a claim is renewed: most leases that are handed over end before the next tick."""
MIN_TICK = 0.005
"""Least seconds between two ticks, so that many different deadlines do not keep the loop busy."""


class GrantManager:
    """The manager of all grants of a coordinator; composes the timer, the renewals and the releases."""

    def __init__(
        self,
        commands: Callable[[], Commands],
        *,
        leases: Callable[[], Iterable[Grant]],
        forget: Callable[[Grant], None],
        keeps: Callable[[Grant], bool],
        check_context: Callable[[], None],
        stalled: Callable[[float], None],
        settings: LeaseSettings,
    ) -> None:
        self.settings: LeaseSettings = settings
        self.check_context: Callable[[], None] = check_context
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._commands = commands
        self._leases = leases
        self._forget = forget
        self._keeps = keeps
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # local clock
        self._late = 0.0
        self._asleep = now() - self.loop.time()  # so far; the clock of the loop stands still meanwhile
        self._stalls = Stalls(stalled)
        self._schedule = Schedule()
        self.dismiss: Callable[[Grant], None] = self._schedule.leave
        """Stop looking at a grant."""
        self.slices: Slices = Slices(self.loop)
        self.renewals: Renewals = Renewals(commands, self.keep, self.ask)
        self.releases: Releases = Releases(commands, self.loop, settings.retry_for, forget)
        # Grants call these on the manager; the attributes save a call in between.
        self.extend: Callable[[Grant, int], Awaitable[None]] = self.renewals.extend
        self.release: Callable[[Grant], None] = self.releases.release

    def keep_new(self, lease: Grant) -> None:
        """Look at a grant in time, which was just made."""
        if lease.renew_at >= self._tick_at:
            self._schedule.put_off[lease] = None
        else:
            self.keep(lease)

    def keep(self, lease: Grant) -> None:
        """Look at ``lease`` in time, as its deadline was moved."""
        if lease in self._schedule.put_off:
            if lease.renew_at >= self._tick_at:
                return
            del self._schedule.put_off[lease]
        when, slack = lease.renew_at, lease.period / 8
        if when >= lease.deadline or lease.renewing:
            when = lease.deadline
            slack = (when - now()) / 8
        self._enter(lease, when, slack)

    def _enter(self, lease: Grant, when: float, slack: float) -> None:
        if when < math.inf and self._schedule.enter(lease, when, slack) and when < self._tick_at:
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
        self._late = max(self._late if schedule.behind else 0.0, late)
        asleep, self._asleep = self._asleep, begun - self.loop.time()
        if self._asleep - asleep >= SHORTEST:  # the timers of shares do not count that time
            self.slices.run(self._look_at_shares())
        self._timer, self._tick_at = None, math.inf
        if schedule.put_off:
            self.slices.run(self._enter_put_off())
        schedule.collect(begun)
        time, left = begun, LEASES_PER_LOOK
        try:
            while left and time < begun + SECONDS_PER_LOOK and (lease := schedule.take()) is not None:
                self._look_at(lease, time)
                time, left = now(), left - 1
        finally:
            self._stalls.note(time, time - begun)
            if schedule.behind:
                self._tick_in(MIN_TICK if schedule.in_time(time) else 0.0)
            elif (next_due := schedule.next_due()) < math.inf:
                self._tick_in(next_due - time)

    def _look_at(self, lease: Grant, time: float) -> None:
        """Renew ``lease`` if it is due; lose it if its deadline has passed."""
        lease.look_at_shares(time)
        if lease.state is not LeaseState.HELD or not self._keeps(lease):
            return
        if time >= lease.deadline:
            # A renewal in flight was sent in good time, so the server was out of reach, unless it refused (`cause_of`).
            lease.lose("unreachable" if lease.renewing else "expired")
            return
        if not lease.renewing and time >= lease.renew_at - min(MAX_SLACK, lease.period / 8):
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

    def _enter_put_off(self) -> Iterator[None]:
        while self._schedule.put_off:
            self.keep(self._schedule.put_off.popitem()[0])
            yield

    def _look_at_shares(self) -> Iterator[None]:
        for lease in self._leases():
            lease.look_at_shares(now())
            yield

    def stalled_since(self, time: float) -> float:
        """Return how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self._stalls.since(time) + (max(0.0, now() - self._tick_at) if self._timer else 0.0)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server of ``keys`` answers, or (``stalled``) its silence could not have been noticed."""
        return self._commands().executor.answering(keys, stalled)

    # -- for grants ------------------------------------------------------------------------------------

    def forget(self, lease: Grant) -> None:
        """Let go of ``lease``, which is lost."""
        self._forget(lease)
        perhaps = lease.outlasts or self.renewals.may_be_prolonged(lease)
        if lease.reason != "closed" and not lease.reusable and perhaps:
            # It is lost here, but the server may have prolonged it, or may still do so. Others would wait for nothing.
            lease.interrupted = True
            self.releases.undo(lease.keys, lease.wire_token, pending=lease.replayed, release_args=lease.release_args())

    def take_away(self, lease: Grant) -> None:
        """Take ``lease`` from its holder, because the coordinator is closed, and release it."""
        lease.interrupted = True
        self.release(lease)
        lease.lose("closed")

    def let_go(self, lease: Grant) -> None:
        """Forget ``lease``, which goes on without this process."""
        lease.state = LeaseState.RELEASED
        self._forget(lease)
        lease.notify_ended()

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return the grants that must hold on the server for ``lease`` to hold."""
        return (lease,)

    async def ask(
        self, lease: Grant, send: Send, answered: Callable[[Call], SyncError | None], by: float = math.inf
    ) -> None:
        """Send a command about ``lease``; raise the error that ``answered`` makes of its answer.

        It is repeated as by `send`. After a cancellation it is finished in the background.
        """
        outcome: asyncio.Future[None] = self.loop.create_future()

        def done(call: Call) -> None:
            error = answered(call)
            if outcome.done():
                return
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

        self.send(lease, send, done, by)
        await outcome_of(outcome)

    def send(self, lease: Grant, send: Send, done: Callable[[Call], None], by: float = math.inf) -> Call:
        """Send a command about ``lease``, and call ``done`` with its answer; closing the coordinator waits for it.

        It is repeated until the deadline, or until ``by`` (local clock).
        """
        in_flight = self.releases.in_flight

        def answered(call: Call) -> None:
            in_flight.finished(call)
            done(call)

        time = now()
        expires = min(lease.deadline, time + self.settings.retry_for, by)
        call = send(self._commands(), Delivery(time, expires, answered))
        in_flight.started(call)
        return call
