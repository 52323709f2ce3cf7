"""Renewals, which are sent when they are due or requested, and what their answers mean.

No answer does not mean lost (P6): the link repeats a renewal without an answer until the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from .._client.replies import Argument
from .._core import logs
from .._core.clock import now
from .._engine.commands import Commands, Delivery, read_renew
from .._scripts.constants import Renewed
from .._transport.call import Call
from ..errors import CommandRefused, LossReason, SyncError
from .deadlines import Deadlines, changed_nothing
from .grant import Grant
from .settings import LeaseState


class Renewals(Deadlines):
    """The renewals of a coordinator's grants."""

    def recheck(self, lease: Grant) -> None:
        """Ask the server now, after a reconnect, whether ``lease`` is still ours."""
        if lease.state is LeaseState.HELD and lease.ttl_ms and not lease.renewing:
            self.renew_if_due(lease)

    def due(self, lease: Grant) -> int:
        """Return the milliseconds from now that a renewal would ask for; 0 if it would gain nothing."""
        if not lease.auto_renew:
            return 0
        time = now()
        left = lease.hold_limit - time
        ttl = min(lease.ttl_ms, math.floor(left * 1000)) if left < math.inf else lease.ttl_ms
        return 0 if time + ttl / 1000 <= lease.deadline else ttl  # max_hold

    def renew_if_due(self, lease: Grant) -> None:
        """Renew ``lease``, or look at it later if a renewal would gain nothing yet."""
        ttl = self.due(lease)
        if ttl:
            self.renew(lease, ttl)
        else:  # the identity may have joined a lease that lasts longer than its own ttl
            later = lease.deadline - lease.ttl_ms / 1500
            lease.renew_at = later if later > now() else lease.deadline

    def renew(self, lease: Grant, ttl: int) -> None:
        """Renew ``lease`` by ``ttl`` milliseconds from now."""
        asked, weight = lease.asks(), lease.weight
        sent = self.begin(lease, ttl)

        def done(call: Call) -> None:
            self.settle(lease, sent, call)
            self.apply_answer(lease, ttl, call, weight, asked)

        delivery, refused = Delivery(now(), lease.deadline, done), partial(self._note_refusal, lease)
        self._hub.commands.renew(
            lease.keys, lease.wire_token, delivery, ttl_ms=ttl, more=asked, weight=weight, refused=refused
        )

    def _note_refusal(self, lease: Grant, call: Call, error: CommandRefused) -> None:
        """Note that the server refused a renewal. Log that, once for each renewal and unless it may soon be over."""
        if lease.state is not LeaseState.HELD:
            return
        time, lasts = now(), call.begun + min(1.0, (lease.deadline - call.begun) / 4)
        if lease.refused < lasts and (time >= lasts or call.over):
            logs.log("renewal_refused", lock=lease.name, error=error, left=lease.remaining())
        if time < lease.deadline:  # not if it is read late, after a stall
            lease.refused = time

    def apply_answer(
        self, lease: Grant, ttl: int, call: Call, weight: int = 1, asked: tuple[Argument, ...] = ()
    ) -> SyncError | None:
        """Apply the answer to a renewal by ``ttl`` milliseconds (0: it changed nothing); return its error, if any.

        ``weight`` is that of the lease when the renewal was sent.
        """
        if lease.state is not LeaseState.HELD:
            lease.outlasts |= ttl > 0 and call.error is None
            return lease.loss() if lease.state is LeaseState.LOST else None
        if call.error is not None:
            lease.renew_at = now() + min(1.0, lease.period / 6)
            if isinstance(call.error, CommandRefused):
                self._note_refusal(lease, call, call.error)
            elif now() >= lease.deadline:
                lease.lose("unreachable")
            self._manager.keep(lease)
            return call.error
        outcome = read_renew(call.reply)
        if outcome is Renewed.GONE and weight > lease.weight:  # a writer sent it, and it arrived after the downgrade
            self.renew_if_due(lease)
            self._manager.keep(lease)
            return None
        if outcome is not Renewed.RENEWED:
            reason: LossReason = "expired" if outcome is Renewed.GONE else "taken"
            lease.lose(reason)
            return lease.loss()
        if ttl:
            self.apply(lease, (call.sent, ttl / 1000))
            lease.renewed(asked, call.reply)
        return None

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Renew ``lease`` now with another ttl."""

        def executed(call: Call) -> None:
            lease.ttl_ms = ttl
            renewed = call.error is None and read_renew(call.reply) is Renewed.RENEWED
            if renewed and lease.state is LeaseState.HELD:  # also past `max_hold`
                lease.hold_limit = max(lease.hold_limit, call.sent + ttl / 1000)

        await self._renew_now(lease, ttl, executed)

    async def reserve(self, lease: Grant, fences: int) -> None:
        """Reserve the next ``fences`` fences after that of ``lease``, which lasts as before."""
        left_ms = math.floor((lease.deadline - now()) * 1000)
        await self._renew_now(lease, max(1, left_ms), lambda _: None, (fences,))

    async def _renew_now(
        self, lease: Grant, ttl: int, executed: Callable[[Call], None], more: tuple[Argument, ...] = ()
    ) -> None:
        """Renew ``lease`` by ``ttl`` milliseconds from now.

        ``executed`` is called with the answer, unless the renewal certainly changed nothing.
        """
        weight, sent = lease.weight, self.begin(lease, ttl)

        def answered(call: Call) -> SyncError | None:
            self.settle(lease, sent, call)
            if not changed_nothing(call):
                executed(call)
            return self.apply_answer(lease, ttl, call, weight)

        def send(commands: Commands, told: Delivery) -> Call:
            refused = partial(self._note_refusal, lease)
            return commands.renew(
                lease.keys, lease.wire_token, told, ttl_ms=ttl, more=more, weight=weight, refused=refused
            )

        await self._manager.ask(lease, send, answered)
