"""Keeps the leases of one coordinator: renews them in one batch, notices their end, releases them.

One timer for all of them, not a task per lease. A tick looks at the leases that are due (`_leases/schedule.py`), and
costs nothing for the others: those whose time has come are renewed, all in the same turn of the loop and so in one
write; those whose deadline has passed are lost. A lease is due after a third of its time, and a tick takes along what
would be due soon after. Many are looked at in slices, with a pause after each one while there is time.

Unknown is not lost (P6): a renewal without an answer is repeated by the link until the deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator

from .._client.resp import Argument
from .._client.settings import Client
from .._core import logs
from .._core.cancellation import outcome_of
from .._core.clock import now
from .._core.keys import Keys
from .._core.slices import Slices
from .._core.stalls import SHORTEST, Stalls
from .._engine.commands import Commands, Delivery, Send
from .._engine.replies import read_renew
from .._scripts.constants import WRITER_WEIGHT, Released, Renewed
from .._transport.call import Call
from ..errors import CommandRefused, LossReason, SyncError
from .deadlines import Deadlines, changed_nothing
from .grant import Grant
from .in_flight_counter import InFlightCounter
from .releases import namesakes_of, notice_end, release_error
from .schedule import AT_ONCE, LONGEST, SLACK, Schedule
from .terms import LeaseState

TICK = 0.5
"""Seconds between two looks at most, so that time asleep (suspension) is noticed soon after. It is less than the time
until a claim is renewed: most leases that are handed over end before the next look."""
NEAR = 0.005
"""Seconds between two looks at least, so that many different deadlines do not keep the loop busy."""


class Renewals(Deadlines):
    """The keeper of all leases of a coordinator."""

    asked_response_timeout: float | None = None

    def __init__(
        self,
        engine: Callable[[], Commands],
        leases: Callable[[], Iterable[Grant]],
        forget: Callable[[Grant], None],
        keeps: Callable[[Grant], bool],
        loosen: Callable[[Grant], bool],
        retry_for: float,
        patience: float,
        exit_timeout: float,
        check_context: Callable[[], None],
        client: Client,
    ) -> None:
        self.client = client
        self.check_context = check_context
        self.response_timeout = patience
        self.exit_timeout = exit_timeout
        super().__init__(lambda: engine().executor.alone)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._engine = engine
        self._leases = leases
        self._forget = forget
        self._keeps = keeps
        self._loosen = loosen
        self.retry_for = retry_for
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # local clock
        self._late = 0.0
        self._asleep = now() - self.loop.time()  # so far: the loop's clock stands still meanwhile
        self._stalls = Stalls()
        self._schedule = Schedule()
        self.dismiss: Callable[[Grant], None] = self._schedule.leave
        """Keep a lease no longer."""
        self.slices: Slices = Slices(self.loop)
        self.under_way: InFlightCounter = InFlightCounter()

    def keep_new(self, lease: Grant) -> None:
        """Keep a lease that was just granted."""
        if lease.renew_at >= self._tick_at:
            self._schedule.put_off[lease] = None
        else:
            self.keep(lease)

    def keep(self, lease: Grant) -> None:
        """Look at ``lease`` in time: it has another deadline."""
        if lease in self._schedule.put_off:
            if lease.renew_at >= self._tick_at:
                return
            del self._schedule.put_off[lease]
        when, slack = lease.renew_at, lease.period / 8
        if when >= lease.deadline or lease.renewing or lease.upgraded:
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
        delay = min(max(delay, NEAR), TICK)
        self._tick_at = now() + delay
        self._timer = self.loop.call_later(delay, self._tick)

    def stop(self) -> None:
        """Never look again."""
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
        if self._asleep - asleep >= SHORTEST:  # timers of shares do not count that
            self.slices.run(self._look_at_shares())
        self._timer, self._tick_at = None, math.inf
        if schedule.put_off:
            self.slices.run(self._enter_put_off())
        schedule.collect(begun)
        time, left = begun, AT_ONCE
        try:
            while left and time < begun + LONGEST and (lease := schedule.take()) is not None:
                self._look_at(lease, time)
                time, left = now(), left - 1
        finally:
            lease = None  # perhaps only references keep it from now on
            self._stalls.note(time, time - begun)
            if schedule.behind:
                self._tick_in(NEAR if schedule.in_time(time) else 0.0)
            elif (next_due := schedule.next_due()) < math.inf:
                self._tick_in(next_due - time)

    def _look_at(self, lease: Grant, time: float) -> None:
        """Renew ``lease`` if that is due; lose it if its deadline has passed."""
        lease.look_at_shares(time)
        if lease.state is not LeaseState.HELD or not self._keeps(lease):
            return
        if time >= lease.deadline:
            # A renewal that was sent in good time and has no answer yet: nobody could be reached.
            lease.lose("unreachable" if lease.renewing else "expired")
            return
        if not lease.upgraded and not lease.renewing and time >= lease.renew_at - min(SLACK, lease.period / 8):
            if self._late > lease.period / 3:
                logs.renewal_late(lease.name, self._late, lease.remaining(), lease.period, lease.claim)
            if self._loosen(lease):
                self._enter(lease, time, 0.0)  # if nobody refers to it, it is gone by then
                return
            self._renew(lease)
        self.keep(lease)

    def _enter_put_off(self) -> Iterator[None]:
        while self._schedule.put_off:
            self.keep(self._schedule.put_off.popitem()[0])
            yield

    def _look_at_shares(self) -> Iterator[None]:
        for lease in self._leases():
            lease.look_at_shares(now())
            yield

    def stalled_since(self, time: float) -> float:
        """Return for how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self._stalls.since(time) + (max(0.0, now() - self._tick_at) if self._timer else 0.0)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers; ``stalled``: or nobody could have noticed."""
        return self._engine().executor.answering(keys, stalled)

    def recheck(self, lease: Grant) -> None:
        """Ask the server at once whether the lease is still ours (after a reconnect)."""
        if lease.state is LeaseState.HELD and lease.ttl_ms and not lease.renewing:
            self._renew(lease)

    def due(self, lease: Grant) -> int:
        """Return for how many milliseconds from now a renewal would be; 0 when there is nothing to gain."""
        if not lease.auto_renew:
            return 0
        time = now()
        left = lease.until - time
        ttl = min(lease.ttl_ms, math.floor(left * 1000)) if left < math.inf else lease.ttl_ms
        return 0 if time + ttl / 1000 <= lease.deadline else ttl  # max_hold

    def _renew(self, lease: Grant) -> None:
        ttl = self.due(lease)
        if ttl:
            self.renew(lease, ttl)
        else:  # an identity may have joined a lease that lasts longer than its own ttl
            later = lease.deadline - lease.ttl_ms / 1500
            lease.renew_at = later if later > now() else lease.deadline

    def renew(self, lease: Grant, ttl: int) -> None:
        """Renew ``lease`` by ``ttl`` milliseconds from now."""
        asked, weight = lease.asks(), lease.weight
        sent = self.sends(lease, ttl)

        def done(call: Call) -> None:
            self.heard(lease, sent, call)
            self.renewed(lease, ttl, call, weight, asked)

        delivery = Delivery(now(), lease.deadline, done)
        self._engine().renew(lease.keys, lease.wire_token, delivery, ttl_ms=ttl, more=asked, weight=weight)

    def renewed(
        self, lease: Grant, ttl: int, call: Call, weight: int = 1, asked: tuple[Argument, ...] = ()
    ) -> SyncError | None:
        """Take the answer to a renewal (by 0 ms: it was left as it is); return what went wrong, if it did.

        ``weight``: of the lease when it was sent.
        """
        if lease.state is not LeaseState.HELD:
            lease.outlasts |= ttl > 0 and call.error is None
            return lease.loss() if lease.state is LeaseState.LOST else None
        if call.error is not None:
            lease.renew_at = now() + min(1.0, lease.period / 6)
            if isinstance(call.error, CommandRefused):
                logs.renewal_refused(lease.name, call.error, lease.remaining())
            elif now() >= lease.deadline:
                lease.lose("unreachable")
            self.keep(lease)
            return call.error
        outcome = read_renew(call.reply)
        if outcome is Renewed.GONE and weight > lease.weight:  # it was sent by a writer, and came after the downgrade
            self._renew(lease)
            return None
        if outcome is not Renewed.RENEWED:
            reason: LossReason = "expired" if outcome is Renewed.GONE else "taken"
            if lease.reader is not None:  # first: what is gone is not put back
                lease.reader.permit.lose(reason)
            lease.lose(reason)
            return lease.loss()
        if ttl:
            self.learned(lease, (call.sent, ttl / 1000))
            lease.renewed(asked, call.reply)
        return None

    def forget(self, lease: Grant) -> None:
        """Keep ``lease`` no longer: it is lost."""
        self._forget(lease)
        self._put_back(lease)
        perhaps = lease.outlasts or self._unanswered.any(lease)
        if lease.reader is None and lease.reason != "closed" and not lease.reusable and perhaps:
            # Nobody has it here, and the server may have prolonged it, or do so yet: others would wait in vain.
            lease.interrupted = True
            self.undo(lease.keys, lease.wire_token, pending=lease.replayed, closing=lease.closing())

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return what has to hold on the server for ``lease`` to hold."""
        return (lease,)

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Renew ``lease`` now with another ttl."""

        def executed(call: Call) -> None:
            lease.ttl_ms = ttl
            permit = lease.permit
            renewed = call.error is None and read_renew(call.reply) is Renewed.RENEWED
            if not renewed or lease.state is not LeaseState.HELD:
                return
            if lease.reader in (None, permit):  # else it ends with that task's share of the permit, as before
                for extended in (lease, permit):  # also beyond `max_hold`
                    extended.until = max(extended.until, call.sent + ttl / 1000)

        await self._renew_now(lease, ttl, executed)

    async def reserve(self, lease: Grant, fences: int) -> None:
        """Let nobody have the ``fences`` next fences after that of ``lease``; it ends as before."""
        left_ms = math.floor((lease.deadline - now()) * 1000)
        await self._renew_now(lease, max(1, left_ms), lambda _: None, (fences,))

    async def _renew_now(
        self, lease: Grant, ttl: int, executed: Callable[[Call], None], more: tuple[Argument, ...] = ()
    ) -> None:
        """Renew ``lease`` by ``ttl`` milliseconds from now.

        ``executed`` is called with the answer, unless it is certain that nothing was changed.
        """
        weight, sent = lease.weight, self.sends(lease, ttl)

        def answered(call: Call) -> SyncError | None:
            self.heard(lease, sent, call)
            if not changed_nothing(call):
                executed(call)
            return self.renewed(lease, ttl, call, weight)

        def send(commands: Commands, told: Delivery) -> Call:
            return commands.renew(lease.keys, lease.wire_token, told, ttl_ms=ttl, more=more, weight=weight)

        await self.ask(lease, send, answered)

    async def ask(
        self, lease: Grant, send: Send, answered: Callable[[Call], SyncError | None], by: float = math.inf
    ) -> None:
        """Send a command about ``lease``; raise what ``answered`` makes of its answer.

        It is repeated until the deadline, or until ``by`` (local clock). On cancellation it goes on.
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

        time = now()
        send(self._engine(), Delivery(time, min(lease.deadline, time + self.retry_for, by), done))
        await outcome_of(outcome)

    def release(self, lease: Grant) -> None:
        """Send the release of ``lease``; it goes on until answered, or until it is expired anyway."""
        time, pending, undoes = now(), lease.replayed, lease.reusable
        told = Delivery(time, min(lease.deadline, time + self.retry_for), self._release_answered)
        keys, token, closing = lease.keys, lease.wire_token, lease.closing()
        call = self._engine().release(keys, token, told, about=lease, pending=pending, closing=closing, undoes=undoes)
        # A command that is alone is on its way already (see Wire): the rest costs no latency.
        self.under_way.started(call)
        self._forget(lease)
        if lease.reader is not None:
            self.keep(lease.reader.permit)  # it is renewed by itself again
        if (here := namesakes_of(lease)) is not None:
            here.release_sent(lease.wire_token, 0 if lease.reader is None else WRITER_WEIGHT)

    def undo(
        self,
        keys: Keys,
        token: bytes,
        ticket: bytes = b"",
        *,
        pending: bool = False,
        closing: tuple[Argument, ...] = (),
        done: Callable[[Call], None] | None = None,
        expires: float | None = None,
    ) -> None:
        """Send a release that nobody waits for, again and again: see `Resource.undo`.

        For a minute at least, or until ``expires`` (local clock).
        """

        def answered(call: Call) -> None:
            self.under_way.finished(call)
            if done is not None:
                done(call)

        time = now()
        if expires is None:
            expires = time + max(self.retry_for, 60.0)
        told, undoes = Delivery(time, expires, answered), not pending
        call = self._engine().release(keys, token, told, ticket=ticket, pending=pending, closing=closing, undoes=undoes)
        self.under_way.started(call)

    def _put_back(self, lease: Grant) -> None:
        """Make a reader of a writer whose release nobody will send, or that had no answer.

        The reader's renewals would keep everybody out otherwise.
        """
        reader = lease.reader
        if reader is not None:
            if reader.state is not LeaseState.HELD:
                return
            self.keep(reader.permit)  # it is renewed by itself again
        if lease.attempt:
            self.undo(lease.keys, lease.wire_token, pending=lease.replayed, closing=lease.closing())

    def _release_answered(self, call: Call) -> None:
        self.under_way.finished(call)
        lease: Grant = call.about
        if (here := namesakes_of(lease)) is not None:
            here.release_answered(lease.wire_token)
        plainly = call.reply == Released.RELEASED and lease.state is LeaseState.RELEASING
        error = None if plainly else release_error(lease, call)
        awaited = bool(lease.releasers)
        lease.release_ended(error)
        if error is None or lease.state is not LeaseState.HELD:
            return
        if lease.attempt:  # nobody may count on it any more: the server is told that its reader reads
            if awaited:  # who released it is told by the error, not by a cancellation
                lease.on_loss = None
            lease.lose("unreachable")
        else:
            notice_end(self.loop, lease)
