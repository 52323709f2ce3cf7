"""A name as this process sees it: its waiters, its tickets at the server, its leases.

A waiter has a ticket of its own, or shares those of a cohort (`cohort.py`). The object exists while one of them does.

Healing (P3). A wake-up may be lost with its connection, a holder may die, and other clients may delete the key or give
it another end. So somebody looks again when the present holder's lease should have ended, and every few seconds. One
look per name is enough, since every script settles the whole queue: the oldest ticket repeats its request, which
changes nothing if nothing happened. When the answer shows that the queue was lost, all other tickets repeat theirs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from .._client.resp import Argument
from .._core.backoff import Backoff
from .._core.clock import EARLY, now
from .._core.display import text
from .._core.keys import Endpoint, Keys, PermitKeys
from .._engine.commands import Commands
from .._leases.choice import refuse_deadlock
from .._leases.grant import Grant
from .._leases.held import HeldLeases
from .._scripts.constants import WRITER_WEIGHT, Look
from .._sharing.cohort import Cohort
from .._sharing.shared_grant import ProcessGrant, TaskLease
from .._transport.call import Call
from ..errors import CoordinatorClosed, copy_error
from .identities import IdentityRequests
from .waits import Waits

if TYPE_CHECKING:
    from .._leases.manager import GrantManager
    from .acquisition import Acquisition
    from .queued import QueuedTickets
    from .request import Request


MANY = 16
LAST_LOOK = 0.25
"""Seconds that the answer to the look at the end of a timeout has."""


class HubServices(Protocol):
    """What a name needs of its coordinator."""

    loop: asyncio.AbstractEventLoop
    engine: Commands
    manager: GrantManager
    tickets: dict[int, Acquisition]
    queued_tickets: QueuedTickets
    bases: dict[int, ProcessGrant]
    burst: int
    slice: float
    pushes: bool
    poll_ms: int
    claim_ms: int
    poll_cap: float
    poll: Backoff
    retry_for: float

    def connection_error_of(self, keys: Keys) -> Exception | None: ...
    def endpoint_of(self, keys: Keys) -> Endpoint: ...
    def next_number(self) -> int: ...
    def check(self) -> None: ...
    def resource(self, keys: Keys, spare: Resource | None = None) -> Resource: ...
    def forget(self, resource: Resource) -> None: ...


class Resource:
    """See the top of this module."""

    __slots__ = (
        "_fires_at",
        "_heal",
        "_last",
        "_look_at",
        "_look_every",
        "_many",
        "_polls",
        "cohorts",
        "endpoint",
        "held_until",
        "hub",
        "keys",
        "leases",
        "name",
        "namesakes",
        "tickets",
        "waits",
    )

    def __init__(self, hub: HubServices, keys: Keys) -> None:
        self.hub = hub
        self.keys = keys
        self.endpoint = hub.endpoint_of(keys)
        """What the server knows us as."""
        self.name = text(keys.name)
        self.tickets: dict[int, Acquisition] = {}  # oldest first
        self.leases = HeldLeases()
        self.namesakes: IdentityRequests | None = None  # once somebody asked by an identity
        self.cohorts: dict[tuple[int, int], Cohort] = {}  # by weight and limit of what they want
        self._many = MANY  # of them: time to forget those that nobody uses
        self._heal: asyncio.TimerHandle | None = None
        self._look_at = 0.0  # local clock
        self._fires_at = 0.0  # when the timer fires: not later than that
        self._look_every = hub.poll_cap  # seconds, while there are tickets
        self._polls: Iterator[float] | None = None
        self._last: list[Callable[[], None]] = []  # what ends with the answer to the present look
        self.held_until: float | None = None  # by the present holder, if not renewed; local clock
        self.waits: Waits | None = None  # while anybody waits

    # -- tickets ---------------------------------------------------------------------------------------

    def add(self, ticket: Acquisition) -> None:
        """Know ``ticket``, so that a grant finds it."""
        self.tickets[ticket.number] = self.hub.tickets[ticket.number] = ticket
        if ticket.look_every < self._look_every:
            self._look_every = ticket.look_every

    def remove(self, number: int) -> None:
        """Forget the ticket ``number``."""
        ticket = self.tickets.pop(number, None)
        if ticket is None:
            return
        del self.hub.tickets[number]
        if self.namesakes is not None:
            self.namesakes.remove(ticket, number)
        if not self.tickets:
            self._stop_healing()
            self.forget_if_idle()
        elif self._heal is None:
            # The look that was under way may have been this ticket's, and its answer is lost with it.
            self._look_in(0.0)

    def queued(self, left: float | None, look: int) -> None:
        """A ticket is in the queue; the holder's lease ends in ``left`` seconds, if it is not renewed.

        ``look`` is a `Look`.
        """
        self.busy(left)
        if self.waits is None:
            self.waits = Waits(self)
        if left is None:
            self.waits.endless()
        delay = self._look_every
        if look == Look.SOON or not self.hub.pushes:  # nobody will wake us: poll, with back-off
            if self._polls is None:
                self._polls = iter(self.hub.poll)
            delay = min(delay, next(self._polls, self.hub.poll.cap))
        else:
            self._polls = None
            if look == Look.IN_TIME:
                delay = min(delay, self.hub.claim_ms / 1000)
        self._look_in(delay if left is None else min(left + EARLY, delay))
        self._looked()

    def queue_lost(self) -> None:
        """Ask for all tickets again: the queue was lost, and with it their places (FLUSHALL, an eviction)."""
        for ticket in list(self.tickets.values()):
            ticket.place_lost()

    def busy(self, left: float | None) -> None:
        """Somebody holds it for ``left`` seconds more, if he does not renew."""
        self.held_until = None if left is None else now() + left

    def holder_remaining(self) -> float | None:
        """Return for how many seconds the present holder has it, as far as is known."""
        if not isinstance(self.keys, PermitKeys):
            left = max((lease.remaining() for lease in self.leases.all()), default=0.0)
            if left:  # it is ours: renewed since anybody asked, perhaps
                return None if left == math.inf else left
        return None if self.held_until is None else max(0.0, self.held_until - now())

    def announced(self, until: float) -> None:
        """We are next, and the present holder's lease ends at ``until`` (local clock)."""
        self._polls = None
        self.held_until = until
        self._look_in(min(max(until - now(), 0.0) + EARLY, self._look_every))

    def reroute(self) -> Iterator[None]:
        """What is pushed for the tickets and bases that are out would not reach us any more. One with each step."""
        for ticket in list(self.tickets.values()):
            ticket.reroute()
            yield
        for cohort in list(self.cohorts.values()):
            for base in list(cohort.resting):
                cohort.give_back(base)
            for base in list(cohort.bases):
                cohort.part_with(base)

    # -- healing ---------------------------------------------------------------------------------------

    def look_now(self) -> None:
        """Look again: a lease of this process was lost, so what its waiters wait for may be free."""
        if self.tickets:
            self._look_in(0.0)

    def look_last(self, then: Callable[[], None]) -> None:
        """Look once more at the end of a timeout, and call ``then`` when that was answered.

        Only where nobody wakes the waiters: they poll, or are behind a holder that knows no queue. Else ``then`` is
        called immediately.
        """
        if self._polls is None:
            then()
            return
        if not self._last:
            self.hub.loop.call_later(LAST_LOOK, self._looked)
        self._last.append(then)
        self._look_in(0.0)

    def _looked(self) -> None:
        last, self._last = self._last, []
        for then in last:
            then()

    def _look_in(self, delay: float) -> None:
        self._look_at = now() + delay
        if self._heal is not None:
            if self._fires_at <= self._look_at:
                return  # it finds that it is too early, and goes on waiting
            self._heal.cancel()
        self._fires_at = self._look_at
        self._heal = self.hub.loop.call_later(delay, self._look)

    def _look(self) -> None:
        self._heal = None
        early = self._look_at - now()
        if early > EARLY / 2:  # a look before the key has expired would be wasted
            self._look_in(early)
            return
        oldest = True
        for ticket in list(self.tickets.values()):
            if ticket.withdrawn:
                continue
            # Without pushes a ticket also has to be kept alive on the server.
            if ticket.call is None and (oldest or now() - ticket.sent > self.hub.poll_ms / 3000):
                ticket.ask()
            oldest = False
            if self.hub.pushes:
                return

    def _stop_healing(self) -> None:
        self._polls, self._look_every = None, self.hub.poll_cap
        if self._heal is not None:
            self._heal.cancel()
            self._heal = None

    # -- leases ----------------------------------------------------------------------------------------

    def hold(self, request: Request, token: bytes, fence: int, deadline: float, period: float) -> Grant:
        """Make the lease for a grant, and keep it."""
        kind = ProcessGrant if request.shared else request.grant_type
        lease = kind(self.hub.manager, self.keys, token, fence, deadline, period, request)
        self.leases[lease] = None
        if request.identity is not None:
            self.by_identity().hold(lease)
        self.hub.manager.keep_new(lease)
        return lease

    def decline(self, lease: Grant) -> None:
        """Nobody wants it: give it back, unless its identity held it before the request, or others of it take over."""
        if lease.joined or (
            lease.identity is not None and self.by_identity().pass_on(lease.wire_token, lease.fence, lease)
        ):
            self.drop(lease)
        else:
            lease.give_back()

    def by_identity(self) -> IdentityRequests:
        """Return what is known of those who ask by an identity."""
        if self.namesakes is None:
            self.namesakes = IdentityRequests(self)
        return self.namesakes

    def list_shares(self) -> None:
        """Know which leases each task has of those that tasks share, if there are many."""
        for cohort in self.cohorts.values():
            cohort.list_shares()

    def cohort(self, request: Request) -> Cohort:
        """Return the cohort of tasks that want the same."""
        key = (request.weight, request.limit)
        found = self.cohorts.get(key)
        if found is None:
            if len(self.cohorts) >= self._many:  # there may be one for each weight that was ever asked for
                self.cohorts = {known: cohort for known, cohort in self.cohorts.items() if cohort.in_use}
                self._many = max(MANY, 2 * len(self.cohorts))
            found = self.cohorts[key] = Cohort(self, request)
        return found

    def loosen(self, lease: Grant) -> bool:
        """Leave ``lease`` to those who refer to it if its task has ended; return whether that is new."""
        if isinstance(lease, ProcessGrant):
            lease.loosen()
            return False
        return lease.ownerless() and self.leases.loosen(lease, self.hub.loop, self.forget_if_idle)

    def check_waits(self, request: Request) -> None:
        """Raise WouldDeadlock if the current task would wait for the end of a body of its own."""
        if request.weight and request.limit != WRITER_WEIGHT:
            return  # the limit of a semaphore may grow
        task = asyncio.current_task(self.hub.loop)
        if task is not None and (self.cohorts or self.leases.any_of(task)):
            by = ref(task)
            held = self.leases.of_task(by)
            refuse_deadlock(self.name, [*held, *self._shares()] if self.cohorts else held, by, request.reads)

    def held(self) -> list[Grant]:
        """Return the leases that tasks have, the oldest first of those on the server."""
        return [*(lease for lease in self.leases.all() if not isinstance(lease, ProcessGrant)), *self._shares()]

    def _shares(self) -> list[TaskLease]:
        return [share for lease in self.leases.all() if isinstance(lease, ProcessGrant) for share in lease.everybody()]

    def resized(self, old: int, new: int) -> None:
        """The limit of these permits was changed."""
        for cohort in self.cohorts.values():
            cohort.resized(old, new)

    def on_contention(self) -> None:
        """Somebody waits for the name at the server, perhaps for what several cohorts have."""
        for cohort in self.cohorts.values():
            cohort.on_contention()

    def behind_tickets(self) -> int:
        """Return how many tasks wait without a ticket of their own."""
        lines = sum(max(0, cohort.waiting - len(cohort.openings)) for cohort in self.cohorts.values())
        return lines + sum(base.share_ended is not None for cohort in self.cohorts.values() for base in cohort.bases)

    def task_of(self, token: bytes | None) -> str | None:
        """Return the name of the task that has the base of that token."""
        tasks = [
            share.acquirer() for share in self._shares() if share.acquirer is not None and share.wire_token == token
        ]
        return next((task.get_name() for task in tasks if task is not None), None)

    def give_up(self, why: str) -> Iterator[None]:
        """End all that wait, with CoordinatorClosed, one with each step."""
        error = CoordinatorClosed(f"the wait for {self.name!r} ended: {why}")
        for cohort in self.cohorts.values():
            cohort.give_up(error)
        for ticket in list(self.tickets.values()):
            ticket.withdraw(copy_error(error))
            yield

    def resting(self) -> list[ProcessGrant]:
        """Return what is held and no task has."""
        return [base for cohort in self.cohorts.values() for base in cohort.resting]

    def drop(self, lease: Grant) -> None:
        """Forget ``lease``."""
        self.leases.discard(lease)
        self.hub.manager.dismiss(lease)
        if self.namesakes is not None:
            self.namesakes.drop(lease)
        self.forget_if_idle()

    def undo(
        self,
        token: bytes,
        ticket: bytes,
        *,
        pending: bool = False,
        closing: tuple[Argument, ...] = (),
        done: Callable[[Call], None] | None = None,
    ) -> None:
        """Take back on the server what a request may have left there: its grant, its ticket.

        ``pending``: the request itself may still be under way, and its token, or its attempt, is never used again.
        ``closing``: as `Lease.closing`.
        """
        if token or ticket:
            self.hub.manager.releases.undo(self.keys, token, ticket, pending=pending, closing=closing, done=done)

    def forget_if_idle(self) -> None:
        """Let the coordinator forget this name when nobody waits for it or holds it."""
        if (
            not self.tickets
            and not self.leases
            and self.leases.empty
            and not any(cohort.waiting for cohort in self.cohorts.values())
        ):
            self.hub.forget(self)
            if self.waits is not None:
                self.waits.end()
                self.waits = None
