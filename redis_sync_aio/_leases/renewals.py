"""Renewals, which are sent when they are due or requested; what their answers mean; the deadlines of grants.

No answer does not mean lost (P6): the link repeats a renewal without an answer until the deadline.

A renewal that ends a lease sooner counts from the moment it is sent (P1): the server may execute it, whatever becomes
of the answer. If it is refused, or was never sent, the lease lasts as long as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from .._client.replies import Argument
from .._core import logs
from .._core.clock import now
from .._engine.commands import Commands, read_renew
from .._scripts.constants import Renewed
from .._transport.call import Call
from ..errors import CommandRefused, LossReason, SyncError
from .settings import LeaseState

if TYPE_CHECKING:
    from .grant import Grant
    from .hub import Hub
    from .manager import GrantManager

# -- Renewals in flight, and until when the server certainly keeps a lease in spite of them --------------------


Span: TypeAlias = tuple[float, float]
"""The beginning (local clock) and the seconds from then on."""


STRAY_FOR = 60.0
"""Seconds for which a copy on a lost connection is expected: as long as a tombstone lasts."""


class Sent:
    """A renewal in flight."""

    __slots__ = ("settled", "span")

    def __init__(self, span: Span) -> None:
        self.span: Span = span
        """Least seconds for which the lease lasts if it is executed, counted from before it was first sent."""
        self.settled: bool = False
        """True if its answer is not awaited any more. It may still be executed if there was none."""


class Unanswered:
    """The renewals of one grant that the server may still execute.

    The server may execute any of several renewals in flight last, and a shorter one ends the lease sooner (P1). So the
    lease lasts no longer than the shortest. What the server has confirmed is kept: a renewal that is refused, or was
    never sent, changes nothing.

    A copy of a renewal whose connection was lost may be executed later, even if another copy was answered, unless this
    connection is known to have ended at the server, too. So for a while an answer lets the lease last no longer than
    such a copy would.
    """

    __slots__ = ("confirmed", "sent", "stray", "stray_until")

    def __init__(self, confirmed: Span) -> None:
        self.confirmed: Span = confirmed
        self.sent: list[Sent] = []  # in the order of sending
        self.stray: float = math.inf  # seconds of the shortest copy on a lost connection
        self.stray_until: float = -math.inf  # local clock

    def span(self) -> Span:
        """Return the span for which the lease lasts, whatever the server executes last."""
        since, seconds = self.confirmed
        return min(((since, min(seconds, self.shortest_stray())), *(sent.span for sent in self.sent)), key=sum)

    def shortest_stray(self) -> float:
        """Return the seconds of the shortest copy that is expected; inf if there is none."""
        return self.stray if now() < self.stray_until else math.inf

    def answered(self, sent: Sent, ambiguous: bool, alone: bool) -> None:
        """Note that the server has answered ``sent``, and with that all earlier ones that were given up.

        A copy of those, or of ``sent`` if it is ``ambiguous``, may still arrive by a connection that was lost, unless
        the present one is known to be ``alone``.
        """
        place = self.sent.index(sent)
        given_up = [other for other in self.sent[:place] if other.settled]
        stray = [other.span[1] for other in (*given_up, *((sent,) if ambiguous else ()))]
        if alone:
            self.stray_until = -math.inf
        elif stray:
            self.stray = min(*stray, self.shortest_stray())
            self.stray_until = now() + STRAY_FOR
        self.sent = [other for other in self.sent if other is not sent and other not in given_up]


# -- Renewals and their answers ---------------------------------------------------------------------------------


CLAIM_USED = 1 / 6
"""The part of a claim after which it is renewed. Sections that are shorter than this need no renewal."""


class Renewals:
    """The renewals of a coordinator's grants."""

    def __init__(self, hub: Hub, manager: GrantManager) -> None:
        self._hub = hub
        self._manager = manager

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

    def renew(self, lease: Grant, ttl: int, commands: Commands | None = None) -> Call:
        """Renew ``lease`` by ``ttl`` milliseconds from now; ``commands``: by these instead of those of the link."""
        asked, weight = lease.asks(), lease.weight
        sent = self.begin(lease, ttl)

        def done(call: Call) -> None:
            self.settle(lease, sent, call)
            self.apply_answer(lease, ttl, call, weight, asked)

        call = Call(now(), lease.deadline, done)
        call.refused = partial(self._note_refusal, lease)
        commands = commands or self._hub.commands
        commands.renew(lease.keys, lease.wire_token, call, ttl_ms=ttl, more=asked, weight=weight)
        return call

    def rewrite(self, lease: Grant, commands: Commands) -> Call | None:
        """Write the deadline of ``lease`` again by ``commands``, even if it gains nothing; return None if it is lost.

        An identity that has another lease may have extended it, so nothing ends sooner than is known here.
        """
        if lease.state is not LeaseState.HELD or (left := lease.deadline - now()) <= 0 or left == math.inf:
            return None
        return self.renew(lease, self.due(lease) or max(1, math.floor(left * 1000)), commands)

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

        def send(commands: Commands, call: Call) -> None:
            call.refused = partial(self._note_refusal, lease)
            commands.renew(lease.keys, lease.wire_token, call, ttl_ms=ttl, more=more, weight=weight)

        await self._manager.ask(lease, send, answered)

    # -- deadlines -------------------------------------------------------------------------------------

    def may_be_prolonged(self, lease: Grant) -> bool:
        """Return True if the server may prolong ``lease``, or may have done so, without an answer."""
        unanswered = lease.unanswered
        return unanswered is not None and (bool(unanswered.sent) or unanswered.shortest_stray() < math.inf)

    def renew_claim_soon(self, lease: Grant) -> None:
        """Renew ``lease`` soon: it was handed over for less than its ttl, and a stall would lose it."""
        lease.claim = lease.period
        lease.renew_at = min(lease.renew_at, lease.deadline - lease.period * (1 - CLAIM_USED))
        self._manager.keep(lease)

    def begin(self, lease: Grant, ttl: int) -> Sent:
        """Note that a renewal of ``lease`` is sent now.

        No other renewal is due until it is answered: that would undo what this one asks for.
        """
        if lease.unanswered is None:
            lease.unanswered = Unanswered((lease.deadline - lease.period, lease.period))
        sent = Sent((now(), ttl / 1000))
        lease.unanswered.sent.append(sent)
        lease.renewing += 1
        if sum(sent.span) < lease.deadline:
            self._last_for(lease, sent.span)
        return sent

    def settle(self, lease: Grant, sent: Sent, call: Call) -> None:
        """Settle a renewal after its call was answered or given up. `Renewals.apply_answer` has to follow."""
        unanswered = lease.unanswered
        if sent.settled or unanswered is None:  # its answer was not understood: only the error of that follows
            return
        sent.settled = True
        lease.renewing -= 1
        if changed_nothing(call):
            unanswered.sent.remove(sent)
            if lease.state is LeaseState.HELD and sum(sent.span) <= lease.deadline:
                self._last_for(lease, unanswered.span())
        elif call.error is None:
            unanswered.answered(sent, call.ambiguous, self._hub.link.alone)

    def apply(self, lease: Grant, span: Span) -> None:
        """Let ``lease`` last for ``span``, as the server said, unless a renewal in flight may end it sooner."""
        unanswered = lease.unanswered
        if unanswered is None:
            self._last_for(lease, span)
            return
        unanswered.confirmed = span
        self._last_for(lease, unanswered.span())
        if not self.may_be_prolonged(lease):
            lease.unanswered = None

    def _last_for(self, lease: Grant, span: Span) -> None:
        """Let ``lease`` last for ``span``."""
        since, lease.period = span
        lease.claim = 0.0
        lease.deadline = since + lease.period
        lease.renew_at = since + lease.period / 3 if lease.auto_renew else lease.deadline
        lease.prolonged()
        self._manager.keep(lease)


def changed_nothing(call: Call) -> bool:
    """Return True if ``call`` failed and was certainly not executed: it was refused, or never sent."""
    refused = isinstance(call.error, CommandRefused) and not call.ambiguous
    return refused or (call.error is not None and not call.attempts)
