"""A name as this process sees it: its acquisitions, its leases, and what tasks share of it.

A task that waits has an acquisition of its own, or shares those of a cohort (`cohort.py`). The object exists while
a request waits, or a lease is held.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

from .._core import logs
from .._core.clock import now
from .._core.display import text
from .._core.keys import Endpoint, Keys, PermitKeys
from .._scripts.constants import WRITER_WEIGHT, Look
from .._transport.call import Call
from ..errors._base import copy_error
from .acquisition import Acquisition, Replicated, Request
from .detached import deadlock
from .grant import Grant, HeldLeases
from .identities import IdentityRequests
from .waits import Healing, Waiter, Waits

if TYPE_CHECKING:
    from .cohort import Cohort
    from .hub import Hub


CohortKey: TypeAlias = tuple[int, int, Replicated | None]
"""The weight and the limit of the requests of a cohort, and the confirmation that they ask for."""
NO_COHORTS: dict[CohortKey, Cohort] = {}


class Resource:
    """A name as this process sees it; see the top of this module."""

    __slots__ = (
        "_healing",
        "acquisitions",
        "cohorts",
        "endpoint",
        "held_until",
        "hub",
        "identities",
        "keys",
        "leases",
        "name",
        "waits",
    )

    def __init__(self, hub: Hub, keys: Keys) -> None:
        self.hub: Hub = hub
        self.keys: Keys = keys
        self.endpoint: Endpoint = hub.endpoint_of(keys)
        """The endpoint under which the server knows this process."""
        self.name: str = text(keys.name)
        self.acquisitions: dict[int, Acquisition] = {}  # by their numbers, the oldest first
        self.leases: HeldLeases = HeldLeases()
        self.identities: IdentityRequests | None = None  # from the first request by an identity on
        self.cohorts: dict[CohortKey, Cohort] = NO_COHORTS
        """The cohorts of tasks that share; replaced, never changed."""
        self._healing = Healing(hub, self.acquisitions)
        self.held_until: float | None = None  # by the present holder, if not renewed; local clock
        self.waits: Waits | None = None  # while anybody waits

    # -- acquisitions ----------------------------------------------------------------------------------

    def add(self, acquisition: Acquisition) -> None:
        """Register ``acquisition``, so that a grant finds it."""
        number = acquisition.number
        self.acquisitions[number] = self.hub.acquisitions[number] = acquisition
        if acquisition.look_every < self._healing.look_every:
            self._healing.look_every = acquisition.look_every

    def remove(self, number: int) -> None:
        """Forget the acquisition ``number``."""
        acquisition = self.acquisitions.pop(number, None)
        if acquisition is None:
            return
        del self.hub.acquisitions[number]
        if not self.acquisitions:
            self._healing.stop()
            if not self.leases:
                self.forget_if_idle()
        elif not self._healing.planned:
            # The look that was in flight may have been this acquisition's, and its answer is lost with it.
            self._healing.look_in(0.0)

    def queued(self, left: float | None, look: int) -> None:
        """Plan the next look: an acquisition is in the queue, and the holder's lease ends in ``left`` seconds.

        That is if it is not renewed. ``look`` is a `Look`.
        """
        self.busy(left)
        if self.waits is None:
            self.waits = Waits(self)
            self.waits.find_deadlock()
        if left is None and any(one.look_every == math.inf for one in self.acquisitions.values()):
            self.waits.endless()  # unless no waiter would report it: `compat.Lock` just answers False
        if look == Look.LATER and not self.hub.met_later_layout:
            self.hub.met_later_layout = True
            logs.log("later_layout", lock=self.name)
        self._healing.queued(left, look)

    def queue_lost(self) -> None:
        """Ask for all acquisitions again: the queue was lost, and with it their places (FLUSHALL, an eviction)."""
        for acquisition in list(self.acquisitions.values()):
            acquisition.place_lost()

    def busy(self, left: float | None) -> None:
        """Note that it is held for ``left`` seconds more, unless that is renewed."""
        self.held_until = None if left is None else now() + left

    def holder_remaining(self) -> float | None:
        """Return for how many seconds the present holder has it, as far as is known."""
        if not isinstance(self.keys, PermitKeys):
            left = max((lease.remaining() for lease in self.leases), default=0.0)
            if left:  # this process holds it, and may have renewed it since the last answer
                return None if left == math.inf else left
        return None if self.held_until is None else max(0.0, self.held_until - now())

    def announced(self, until: float) -> None:
        """Look when the present holder's lease ends, at ``until`` (local clock): this process is next."""
        self.held_until = until
        self._healing.announced(until)

    def look_now(self) -> None:
        """Look again: a lease of this process was lost, so what its waiters wait for may be free."""
        if self.acquisitions:
            self._healing.look_in(0.0)

    def look_last(self, then: Callable[[], None], *, name_holders: bool = True) -> None:
        """Look once more at the end of a timeout, and call ``then`` after the answer; see `Healing.look_last`.

        If others hold it, and ``name_holders``, they are asked for before that: see `Waits.ask_holders`.
        """
        waits, keys = self.waits, self.keys
        unknown = not (keys.kind.closed or self.leases or self.hub.connection_error_of(keys))
        if name_holders and waits is not None and unknown:
            then = partial(waits.ask_holders, then)
        self._healing.look_last(then)

    def reroute(self) -> Iterator[None]:
        """Queue again under another endpoint, one acquisition with each step: pushes to the old one do not arrive."""
        for acquisition in list(self.acquisitions.values()):
            acquisition.reroute()
            yield
        for cohort in self.cohorts.values():
            cohort.reroute()

    def waiters(self) -> Iterator[tuple[Waiter, float]]:
        """Iterate over the futures that tasks await which wait for this name, each with its beginning (local clock)."""
        for acquisition in self.acquisitions.values():
            waiter = acquisition.waiter
            if waiter is not None and not waiter.done():
                yield waiter, acquisition.begun
        for cohort in self.cohorts.values():
            yield from cohort.waiters()

    def give_up(self, why: str) -> Iterator[None]:
        """End all waits with CoordinatorClosed, one with each step."""
        error = self.hub.draining_error(f"the wait for {self.name!r} ended: {why}")
        for cohort in self.cohorts.values():
            cohort.give_up(error)
        for acquisition in list(self.acquisitions.values()):
            acquisition.withdraw(copy_error(error))
            yield

    # -- leases ----------------------------------------------------------------------------------------

    def hold(self, request: Request, token: bytes, fence: int, deadline: float, period: float) -> Grant:
        """Make the lease for a grant, and keep it."""
        lease = request.grant_type(self.hub.manager, self.keys, token, fence, deadline, period, request)
        self.leases[lease] = None
        if request.identity is not None:
            lease.same_identity = self.by_identity()
            lease.same_identity.leases.add(token, lease)
        self.hub.manager.keep(lease)
        return lease

    def decline(self, lease: Grant) -> None:
        """Give back a lease that is not needed, unless its identity held it before, or others of it take it over."""
        here = lease.same_identity
        if lease.joined or (here is not None and here.take_over(lease.wire_token, lease.fence, lease)):
            self.drop(lease)
        else:
            lease.reports_loss = False  # no task has it
            lease.give_back()

    def by_identity(self) -> IdentityRequests:
        """Return the requests that go by an identity."""
        if self.identities is None:
            self.identities = IdentityRequests(self)
        return self.identities

    def check_waits(self, request: Request) -> None:
        """Raise WouldDeadlock if the current task would wait for the end of a body of its own."""
        if request.weight and request.limit != WRITER_WEIGHT:
            return  # the limit of a semaphore may grow
        task = asyncio.current_task(self.hub.loop)
        if task is not None and (self.cohorts or self.leases.any_of(task)):
            by = ref(task)
            held = self.leases.of_task(by) if not self.cohorts else self.held()
            error = deadlock(self.name, held, by, request.reads)
            if error is not None:
                raise error

    def refuse_deadlock(self, waiter: Waiter, lease: Grant, task: asyncio.Task[object]) -> None:
        """End the wait of ``task``, which awaits ``waiter``, if its own body holds ``lease`` of the same name."""
        by = ref(task)
        for acquisition in list(self.acquisitions.values()):
            if acquisition.waiter is waiter and (error := deadlock(self.name, [lease], by, acquisition.weight == 1)):
                acquisition.withdraw(error)
                return
        for cohort in self.cohorts.values():
            if error := deadlock(self.name, [lease], by, cohort.reads):
                cohort.refuse_waiter(waiter, error)

    def held(self) -> list[Grant]:
        """Return the leases that tasks hold, the oldest of those on the server first."""
        return [part for lease in self.leases for part in lease.parts]

    def list_shares(self) -> None:
        """Index the leases that tasks share by task if there are many."""
        for cohort in self.cohorts.values():
            cohort.list_shares()

    def on_contention(self) -> None:
        """Stop handing over among tasks after a while: other clients wait for the name at the server."""
        for cohort in self.cohorts.values():
            cohort.on_contention()

    def resized(self, old: int, new: int) -> None:
        """Take note of another limit of these permits."""
        for cohort in self.cohorts.values():
            cohort.resized(old, new)

    def drop(self, lease: Grant) -> None:
        """Forget ``lease``."""
        self.leases.discard(lease)
        self.hub.manager.dismiss(lease)
        if lease.same_identity is not None:
            lease.same_identity.leases.discard(lease.wire_token, lease)
        self.forget_if_idle()

    def undo(
        self, token: bytes, ticket: bytes, *, pending: bool = False, done: Callable[[Call], None] | None = None
    ) -> None:
        """Take back on the server what a request may have left there: its grant, its ticket.

        ``pending``: the request itself may still be in flight, and its token is never used again.
        """
        if token or ticket:
            self.hub.manager.releases.undo(self.keys, token, ticket, pending=pending, done=done)

    def forget_if_idle(self) -> None:
        """Let the hub forget this name when it is neither waited for nor held."""
        cohorts = self.cohorts.values()
        if not (self.acquisitions or self.leases or (cohorts and any(cohort.waiting for cohort in cohorts))):
            hub = self.hub
            if hub.resources.get(self.keys.id) is self:
                del hub.resources[self.keys.id]
                if hub.emptied is not None and not hub.resources:
                    hub.emptied.set()
            if self.waits is not None:
                self.waits.end()
                self.waits = None
