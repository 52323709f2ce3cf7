"""The one acquire path: ask -> (ticket -> wait) -> granted | timed out | cancelled | connection replaced.

An acquisition is one request of one task, or of tasks that share (`cohort.py`). Replies and pushes drive it from the
event loop. The task itself only awaits a future, so it is woken once, whatever happens on the way.

Clean-up (P5): a request ends early when its task is cancelled, its coroutine is closed or its time is up. A release of
token *and* ticket then follows it on the same connection and undoes it, and a grant that came meanwhile is given back.

An identity is a token that may be in use elsewhere: see `IdentityAcquisition`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from .._client.replies import Argument
from .._core.cancellation import undo_in
from .._core.clock import EARLY, now
from .._core.futures import FutureLike, finish
from .._core.keys import BARRIER, Keys
from .._engine.commands import Answer, Commands, Pushed, read_acquire
from .._engine.snapshot import ticket_member
from .._scripts.constants import ASK_AGAIN, SHARING_MARK, WRITER_WEIGHT, Outcome
from .._transport.call import Call, unanswered
from .._transport.witness import Claim
from ..errors import CoordinatorClosed, NotReplicated, QueueFull, SyncError, Unreachable
from .grant import Grant
from .settings import HELD
from .waits import timeout_error

if TYPE_CHECKING:
    from .resource import Resource

# -- Requests of primitives ------------------------------------------------------------------------------------


class Replicated(NamedTuple):
    """The confirmation that a request asks for before its task has the grant."""

    replicas: int
    within: float  # seconds


def refused_if_full(
    answer: Answer, weight: int, *, name: str, most: int, otherwise: Callable[[Answer, int], SyncError]
) -> SyncError:
    """Return the error for a request with a ``max_waiting``; ``otherwise`` makes that for another refusal."""
    if answer.outcome is not Outcome.QUEUE_FULL:
        return otherwise(answer, weight)
    return QueueFull(name=name, waiting=answer.number, max_waiting=most, remaining=answer.left)


def never_refused(answer: Answer, weight: int) -> SyncError:
    """Raise AssertionError: the server always admits locks, readers and writers."""
    raise AssertionError(f"a request of weight {weight} cannot be refused: {answer}")


@dataclass(slots=True)
class Request:
    """A request of a primitive to the server."""

    ttl_ms: int
    auto_renew: bool
    max_hold: float | None = None
    identity: bytes | None = None
    joins: bool = True  # whether it joins a grant that the identity has already
    replaced: bytes = b""  # the token of a detached lease to take up
    wait: bool = True
    weight: int = 0  # the weight of permits; 0 for a lock
    limit: int = 0  # the limit of the permits that the caller knows; 0: the server's
    option: Argument = b""  # the argument of permits behind their limit: see permits/acquire.lua, barrier/join.lua
    unqueued: tuple[Argument, ...] = ()  # more arguments until it has a place in the queue
    shared: bool = False  # whether tasks of this process may hold it one after the other, behind one ticket
    grant_type: type[Grant] = Grant
    linger: float = 0.0  # seconds for which a shared lease is kept without a task
    look_every: float = math.inf  # seconds between two looks while it waits; `poll_cap` if that is less
    label: bytes = b""  # the beginning of a token that is made for it: see `Maker.label`
    replicated: Replicated | None = None
    refused: Callable[[Answer, int], SyncError] = never_refused  # makes the error for an outcome from MISMATCH on

    way: type[Acquisition] = field(init=False)
    """The class of its acquisition, unless tasks share it."""
    more: tuple[Argument, ...] = field(init=False)
    """Its last arguments in the queue: weight, limit and option of permits; whether a lock has an identity."""
    first: tuple[Argument, ...] = field(init=False)
    """Its last arguments until it has a place in the queue."""
    plain: bool = field(init=False)
    """True if its lease is renewed without limit, and weighs nothing or one."""

    def __post_init__(self) -> None:
        self.way = Attachment if self.replaced else Acquisition if self.identity is None else IdentityAcquisition
        self.more = (self.weight, self.limit, self.option) if self.weight else (int(self.identity is not None),)
        self.first = self.more + self.unqueued
        self.plain = self.auto_renew and self.max_hold is None and self.weight <= 1

    def again(self, former: int) -> tuple[Argument, ...]:
        """Return the last arguments of a repeated request, whose ticket had the place ``former`` in the queue."""
        return (*self.more, b"", former)

    @property
    def reads(self) -> bool:
        """True if it is for a reader: any number of readers hold the lock together."""
        return self.limit == WRITER_WEIGHT and self.weight == 1


# -- The latest tickets of this process that stood in a queue, so that a grant to one that is gone can be given back
#
# Such a grant comes from a queue that is older than the server's other data (`_transport.handshake`) where the server
# says that nothing has changed: its keys were restored, or a proxy leads to another server. Or a copy of a
# request was executed late. Such a grant is not used, so without this the name would stay taken for its whole
# `claim`.
#
# The undo of a ticket that was just withdrawn may be in flight, and its grant is given back twice then. That is
# harmless: no other request ever had its token, so the second release finds nothing to release.


HALF = 4096
"""Number of tickets in a generation; two generations are remembered."""


class Queued(NamedTuple):
    """The facts that are needed to give back a grant to a ticket."""

    keys: Keys
    token: bytes


class QueuedTickets:
    """The latest tickets that stood in a queue, by number."""

    def __init__(self) -> None:
        # Two generations: the older one is dropped as a whole, which costs nothing per ticket.
        self._young: dict[int, Queued] = {}
        self._old: dict[int, Queued] = {}

    def add(self, number: int, queued: Queued) -> None:
        """Remember a ticket by its number."""
        if len(self._young) >= HALF:
            self._young, self._old = {}, self._young
        self._young[number] = queued

    def get(self, number: int) -> Queued | None:
        """Return the ticket of that number; None if it is not remembered, or never stood in a queue."""
        return self._young.get(number) or self._old.get(number)


SHARED_TOKEN = b"%b%d" + SHARING_MARK
"""The token of a lease that tasks share, from the prefix of this process and the number of the request."""
LEAST_PART = 50
"""A claim of which less than a fiftieth is left counts as over: it would end before its first renewal is answered."""


class Acquisition:
    """One request on its way to a lease.

    Invariants: ``taker`` ends exactly once, with a lease, None (taken, and not to wait for) or an error. The name and
    its hub know the acquisition as long as a grant for it may arrive that a task wants.
    """

    # Rarely changed; as class attributes they cost nothing to set up.
    _clock_offset: float | None = None
    """Local minus server time, at the request that entered the queue."""
    _queued = False
    """True if an earlier request may have left a ticket in the queue."""
    _placed = False
    """True if the server said that the ticket of the present number is in the queue."""
    _place = 0
    """The place of the ticket of the present number: when it came, by the server's clock, in microseconds; 0: none.

    A ticket whose turn comes while its connection is down is dropped. It gets this place again when it asks again.
    """
    _timer: asyncio.TimerHandle | None = None
    withdrawn: bool = False
    """True if it was given up, and its clean-up waits for an answer. Asking again would queue it behind that."""
    _lease: Grant | None = None
    _end_confirmation: Callable[[], None] | None = None
    """A function that ends the confirmation by replicas, if one has begun."""
    _late_since: float | None = None
    """When the first of several grants in a row had ended before it arrived (local clock)."""
    _replayed = False
    """True if a copy of a request of ours may still be in flight, besides the one that was answered."""
    _pushed_fence = 0
    """The fence of a grant to this ticket, if the server has to be asked how long the grant lasts."""
    contended: bool = False
    """True if others wait behind this request."""
    unheard: bool = False
    """True if it was granted before this answer, so that a contention notice may have been lost since."""

    def __init__(
        self, resource: Resource, request: Request, taker: FutureLike[Grant | None], within: float | None = None
    ) -> None:
        """``within``: the seconds until it gives up; None: never."""
        self._resource = resource
        self._request = request
        self._within = within
        self.taker = taker
        self.call: Call | None = None
        self.sent: float = 0.0
        self.begun: float = 0.0
        self.look_every: float = request.look_every
        self.weight: int = request.weight
        if within is not None:
            self._timer = resource.hub.loop.call_later(within, self._time_out)
        self._name_request()

    def _name_request(self) -> None:
        """Take a new number, and with it a new token unless the caller chose one."""
        hub, request, endpoint = self._resource.hub, self._request, self._resource.endpoint
        self.number: int = hub.next_number()
        self._placed, self._place = False, 0
        own = SHARED_TOKEN if request.shared else b"%b%d"
        made = own % (endpoint.token_prefix, self.number)
        self.token: bytes = request.identity or request.label + made
        self._member = b""
        if request.wait:
            claim_ms = min(request.ttl_ms, hub.claim_ms) if request.auto_renew else request.ttl_ms
            self._member = ticket_member(endpoint.inbox, self.number, claim_ms, self.token, request.weight or 1)
        self._resource.add(self)

    @property
    def waiter(self) -> asyncio.Future[Any] | None:
        """The future that its task awaits; None if it is for tasks that share."""
        return self.taker if isinstance(self.taker, asyncio.Future) else None

    # -- the request -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Send the request, for the first time or to find out what became of it (P3)."""
        hub, request = self._resource.hub, self._request
        self.sent = now()
        self.begun = self.begun or self.sent
        self.call = Call(self.sent, self.sent + hub.retry_for, self.answered)
        hub.commands.acquire(
            self._resource.keys,
            self.token,
            self.call,
            ttl_ms=request.ttl_ms,
            ticket=self._member,
            poll_ms=hub.poll_ms if request.wait else 0,
            more=self._last_words() if self._queued else request.first,
        )

    def _last_words(self) -> tuple[Argument, ...]:
        """Return the last arguments of a repeated request."""
        if self._place and self._resource.keys.kind is not BARRIER:  # whose parties all pass together
            return self._request.again(self._place)
        return self._request.more

    def answered(self, call: Call) -> None:
        """Take the answer to the request, or its failure."""
        self.call = None
        if call.attempts > 1:
            self._replayed = True
        if call.error is not None:
            self._fail(call.error, call)
        elif type(call.reply) is int:  # the fence: the whole ttl was granted immediately
            self._granted(call.reply, call.sent, self._request.ttl_ms / 1000 or inf)
        else:
            self._decided(read_acquire(call.reply), call)

    def _decided(self, answer: Answer, call: Call) -> None:
        request, fence = self._request, answer.number
        if answer.outcome is Outcome.GRANTED:
            self._granted(fence, call.sent, inf if answer.left is None else answer.left, False, answer.previous)
        elif answer.outcome is Outcome.OWN:
            self.unheard = True
            left = inf if answer.left is None else answer.left
            self._granted(fence, call.sent, left, self._joins(fence), answer.previous)
            if self._lease is not None and request.weight:
                self._lease.weight = answer.more
        elif answer.outcome is Outcome.QUEUED:
            self._clock_offset = call.sent - answer.server_time
            lost = self._placed and answer.number == 1
            if not self._placed:
                self._remember_ticket()
            self._queued = self._placed = True
            self._place = self._place or round(answer.server_time * 1e6)
            self._late_since = None
            self._resource.queued(answer.left, answer.more)
            if lost:
                self._resource.queue_lost()
        elif answer.outcome is Outcome.SPENT:  # it was granted once, and had ended before its answer arrived
            self._again()
        elif answer.outcome >= Outcome.MISMATCH:
            self._fail(request.refused(answer, request.weight), call)
        else:
            self._resource.busy(answer.left)
            self._leave()
            finish(self.taker, None, None)

    def _joins(self, fence: int) -> bool:
        """Return True if another request may have been granted ``fence``, which the token had before the answer."""
        return False

    def _remember_ticket(self) -> None:
        """Note the ticket, so that a late grant to it is given back."""
        self._resource.hub.queued_tickets.add(self.number, Queued(self._resource.keys, self.token))

    def recheck(self) -> None:
        """Ask again what became of the request: the connection was replaced."""
        # It may be another server now, with another clock: a push counts from the answer to this request on.
        self._clock_offset = None
        if self.call is None:
            self.ask()

    def place_lost(self) -> None:
        """Ask for another place in the queue, which was lost."""
        if self._placed and self.call is None:
            self._placed = False
            self.ask()

    def reroute(self) -> None:
        """Queue again: the way to the server changed, and with it how a grant reaches us."""
        executed = self._queued or (self.call is not None and self.call.attempts > 0)
        self._drop_call()
        if executed:  # perhaps: its answer may have been lost with the connection
            self._undo_all()
        self._again()

    def _again(self) -> None:
        """Queue again, under another number."""
        old = self.number
        self._name_request()  # first: a name without tickets and leases is forgotten
        self._resource.remove(old)
        self.ask()

    # -- its end ---------------------------------------------------------------------------------------

    def pushed(self, push: Pushed) -> None:
        """Take a push: the grant, or news of the present holder."""
        if self._clock_offset is None:
            return  # the answer to the request was lost with its connection, and the request is being repeated
        # P6: good until our request + (time between request and grant, by the server's clock) + ttl.
        granted = self._clock_offset + push.server_time
        if push.fence == 0:
            self.announced(push.server_time, push.duration)
        elif push.fence == ASK_AGAIN:
            self.recheck()
        else:
            self._drop_call()
            self.contended |= push.contended
            if granted <= now():
                self._granted(push.fence, granted, push.duration or inf, False, push.previous)
            else:  # The server's clock was set ahead meanwhile: only what is left of the grant is known.
                self._pushed_fence = push.fence
                self.recheck()

    def announced(self, server_time: float, duration: float) -> None:
        """Note that this request is next, and that the holder's lease lasts ``duration`` seconds (0: forever)."""
        if self._clock_offset is not None and duration:
            self._resource.announced(min(self._clock_offset + server_time, now()) + duration)

    def _drop_call(self) -> None:
        if self.call is not None:
            self._replayed |= self.call.attempts > 0
            self.call.forget()
            self.call = None

    def _granted(self, fence: int, since: float, duration: float, joined: bool = False, previous: int = 0) -> None:
        """Take a grant, which began at ``since`` (local clock, or earlier) and lasts ``duration`` seconds.

        ``joined``: another request may have been granted it, for another time than this one asked for.
        ``previous``: the fence of the writer before this one; 0: none is known, or this is no writer.
        """
        request, resource = self._request, self._resource
        deadline, least = since + duration, 0.0
        claimed = request.auto_renew and duration < request.ttl_ms / 1000 and not joined
        if claimed:
            least = min(request.ttl_ms, resource.hub.claim_ms) / 1000 / LEAST_PART
        if deadline <= now() + least and request.grant_type.protects:
            # The grant took longer to get here than it lasts: it is none (P1). Undo what may be left of it.
            self._undo_all()
            if self._too_late():
                self._leave()
                if not self.taker.done():
                    advice = "raise Coordinator(claim=)" if claimed else "give it a longer ttl"
                    error = Unreachable(
                        f"Redis takes longer to answer about {resource.name!r} than a lease of {duration:g} seconds "
                        f"lasts: each grant had ended before its reply arrived. Nothing is held; {advice}"
                    )
                    self.taker.set_exception(error)
            else:
                self._again()
            return
        lease = self._lease = resource.hold(request, self.token, fence, deadline, duration)
        if previous:
            lease.previous_fence = previous
        if self._queued:
            lease.queued = True
        if self._replayed:
            lease.replayed = True
        if joined:
            lease.joined = True
        if claimed:
            resource.hub.manager.renewals.renew_claim_soon(lease)
        self._leave()  # after hold(): a name without tickets and leases is forgotten
        if self.taker.done():
            # Cancelled, and the task has not run since: its `task_cancelled` comes later and finds all done.
            self._decline(lease)
        elif request.replicated is not None:
            self._confirm(lease, request.replicated)
        else:
            self.taker.set_result(lease)

    def _confirm(self, lease: Grant, asked: Replicated) -> None:
        """Wait until enough replicas have the grant, before its task has it."""
        hub = self._resource.hub
        witness = hub.link.witness_of(lease.keys)
        renew = partial(hub.manager.renewals.rewrite, lease, Commands(witness))
        lease.reports_loss = False  # no task has it
        claim = Claim(lease.keys.name, renew, *asked, self._confirmed)
        self._end_confirmation = partial(witness.forget, claim)
        witness.confirm(claim)

    def _confirmed(self, claim: Claim) -> None:
        """Let the task have the grant if enough replicas had it while it was held; else give it back."""
        lease, closed, error = self._lease, self._resource.hub.why_closed, claim.error
        assert lease is not None
        if self.taker.done():
            return  # as in `_granted`: its `task_cancelled` comes later
        held = lease.state is HELD and now() < lease.deadline
        if error is None and held and claim.found >= claim.replicas:
            del lease.reports_loss
            self.taker.set_result(lease)
            return
        if error is None and closed is not None:
            error = CoordinatorClosed.used(closed)
        elif error is None:
            found, why = (claim.found, claim.why) if held else (0, "the server lost the grant meanwhile")
            if lease.deadline == inf:  # of an identity that holds it forever
                why = "it has no ttl, so it cannot be renewed"
            name, replicas, within = self._resource.name, claim.replicas, claim.within
            error = NotReplicated(name=name, replicas=replicas, found=found, within=within, why=why)
        self._decline(lease)
        self.taker.set_exception(error)

    def _too_late(self) -> bool:
        """Return whether to give up: another grant took longer to get here than it lasts."""
        if self._late_since is None:
            self._late_since = now()
            return False  # the cause may have been a pause of this process
        return not self._request.wait or now() - self._late_since > self._resource.hub.retry_for

    def _fail(self, error: SyncError, call: Call) -> None:
        self._leave()
        decided = call.error is None and call.attempts == 1
        if self._queued or (call.attempts and not decided):
            # Also when it was refused: an earlier copy may have been executed, or an earlier request have queued
            # us, or a script stopped half-way.
            self._undo_all()
        finish(self.taker, None, error)

    def _time_out(self) -> None:
        if self.taker.done():
            return  # granted in the same turn of the loop: the grant wins
        if self._placed:
            # `compat.Lock`, which looks more often, just answers False.
            self._resource.look_last(self._give_up, name_holders=self.look_every == inf)
        else:
            self._give_up()

    def _give_up(self) -> None:
        if not self.taker.done():
            self.withdraw(self.timeout_error(self._within))

    def timeout_error(self, within: float | None) -> SyncError:
        """Return the error for a task that waited ``within`` seconds, most recently for this acquisition."""
        resource, request = self._resource, self._request
        if self.call is not None and self.call.connection_error is not None:
            return self.call.connection_error
        unheard = not self._queued and now() - self.sent > resource.hub.options.response_timeout - EARLY
        cause = resource.hub.connection_error_of(resource.keys)
        if cause is not None or unheard:
            return unanswered(resource.keys, cause, seconds=within, script=resource.keys.kind.acquire)
        return timeout_error(resource, within, request.weight, request.limit, answered=self._queued)

    def withdraw(self, error: SyncError) -> None:
        """End the request with ``error`` and undo it on the server."""
        self.undo()
        finish(self.taker, None, error)

    def task_cancelled(self, future: asyncio.Future[Grant | None]) -> None:
        """Undo whatever was done for ``future``, the taker, which its task no longer awaits."""
        future.cancel()  # done already if the task was cancelled, but not if its coroutine was closed
        if not future.cancelled() and future.exception() is not None:
            return  # it ended in the same turn, with an error that undid itself
        if self._lease is not None:
            self._decline(self._lease)
        elif future.cancelled():
            self.undo()

    def undo(self) -> None:
        """End the request on the server; the taker has ended, or is ended next."""
        if self._lease is not None:  # its replicas are being counted
            self._decline(self._lease)
            return
        call = self.call
        self._leave()
        self._drop_call()
        if call is None or call.attempts or self._queued:  # else it was never sent
            self._undo_all()

    def _decline(self, lease: Grant) -> None:
        if self._end_confirmation is not None:
            self._end_confirmation()
        self._resource.decline(lease)

    def _undo_all(self) -> None:
        self._resource.undo(self.token, self._member, pending=True)

    def _leave(self) -> None:
        if self._timer is not None:
            self._stop_timer()
        self._resource.remove(self.number)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# -- Requests by identities, and requests for leases that another process has detached, on the acquire path ----


class IdentityAcquisition(Acquisition):
    """An acquisition by an identity, a token that may be in use elsewhere.

    Only what is known to be new is undone, so a request in flight is undone after its answer. Until then its ticket
    stays known, so that a grant to it is given back. See `IdentityRequests` for the other requests of the identity.
    """

    def __init__(
        self, resource: Resource, request: Request, taker: FutureLike[Grant | None], within: float | None = None
    ) -> None:
        super().__init__(resource, request, taker, within)
        self._namesakes = resource.by_identity()
        self._namesakes.requests.add(self.token, self)

    def ask(self) -> None:
        """Send the request unless it was given up: asking again would queue it behind its undo."""
        if not self.withdrawn:
            super().ask()

    def answered(self, call: Call) -> None:
        """Take the answer to the request, or undo the request if it was given up."""
        if not self.withdrawn:
            super().answered(call)
            return
        self.call = None
        fence = 0
        if call.error is None and type(call.reply) is int:
            fence = call.reply
        elif call.error is None:
            answer = read_acquire(call.reply)
            own = answer.outcome is Outcome.OWN
            if answer.outcome is Outcome.GRANTED or (own and answer.number == self._pushed_fence):
                fence = answer.number
        self._undo_answered(fence)

    def _undo_answered(self, fence: int) -> None:
        """Give back the new grant ``fence``; 0: withdraw the ticket."""
        if not fence and self._member:
            self._resource.undo(b"", self._member, done=lambda _: self._leave())
            return
        if fence and not self._namesakes.take_over(self.token, fence):
            self._namesakes.undo(self.token, self._member)
        self._leave()

    def _decided(self, answer: Answer, call: Call) -> None:
        if answer.outcome is Outcome.OWN and not (self._request.joins or call.ambiguous):
            answer = answer._replace(outcome=Outcome.BUSY)
        if answer.outcome >= Outcome.MISMATCH and self._namesakes.is_gone(self.token):
            self.ask()  # behind the release of the grant for which it was refused
        else:
            super()._decided(answer, call)

    def _joins(self, fence: int) -> bool:
        return self._request.joins and fence != self._pushed_fence

    def _remember_ticket(self) -> None:
        """Ignore the ticket: a late grant to it may be in use elsewhere."""

    def reroute(self) -> None:
        """Queue again unless it was given up."""
        if not self.withdrawn:
            super().reroute()

    def pushed(self, push: Pushed) -> None:
        """Take a push; decline the grant if the request was given up."""
        if not self.withdrawn:
            super().pushed(push)
        elif push.fence > 0:
            self._undo_answered(push.fence)

    def _granted(self, fence: int, since: float, duration: float, joined: bool = False, previous: int = 0) -> None:
        if self._namesakes.is_gone(self.token):
            self.ask()  # behind that release
            return
        self._replayed = False  # the token is used again, so it must not be marked as spent
        super()._granted(fence, since, duration, joined, previous)
        if self._lease is not None:
            for other in self._namesakes.requests.of(self.token):
                other.recheck()  # it has the grant, too, without a message of the server

    def undo(self) -> None:
        """Withdraw the request, and undo it once it is answered; the taker has ended, or is ended next."""
        self.withdrawn = True
        self._stop_timer()
        if self.call is None:
            self._undo_answered(0)

    def _undo_all(self) -> None:
        self._resource.undo(b"", self._member)

    def _leave(self) -> None:
        self._namesakes.requests.discard(self.token, self)
        super()._leave()


class Attachment(Acquisition):
    """An acquisition that replaces the token of a detached lease by its own. It never waits.

    It is undone by putting the detached token back, so that the lease may be attached again.
    """

    def ask(self) -> None:
        """Send the request; a repetition finds what the first one did."""
        hub, self.sent = self._resource.hub, now()
        self.begun = self.begun or self.sent
        self.call = Call(self.sent, self.sent + hub.retry_for, self.answered)
        keys, request = self._resource.keys, self._request
        hub.commands.attach(keys, self.token, self.call, ttl_ms=request.ttl_ms, replaced=request.replaced)

    def _decline(self, lease: Grant) -> None:
        """Put the detached token back."""
        if lease.state is HELD:
            self._resource.hub.manager.let_go(lease)
            self._undo_all()

    def _undo_all(self) -> None:
        keys, request = self._resource.keys, self._request
        self._resource.hub.manager.releases.undo_attach(keys, self.token, request.replaced, request.ttl_ms)


async def acquire(resource: Resource, request: Request, within: float | None = None) -> Grant | None:
    """Acquire for the current task: a lease, or None when ``request.wait`` is False and it is taken.

    ``within``: the seconds until it gives up; None: never.
    """
    future: asyncio.Future[Grant | None] = resource.hub.loop.create_future()
    acquisition = request.way(resource, request, future, within)
    acquisition.ask()
    try:
        lease = await future
    except BaseException:
        undo_in(resource.hub.loop, partial(acquisition.task_cancelled, future))
        del acquisition, future  # else they keep the traceback, and so what the caller acquires next, in a cycle
        raise
    if lease is not None and (task := asyncio.current_task(resource.hub.loop)) is not None:
        resource.leases.acquired(lease, task)
    return lease
