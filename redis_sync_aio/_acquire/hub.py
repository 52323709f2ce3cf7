"""All names that this process waits for or holds: the part of a coordinator that knows them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, cast

from .._client.settings import running_loop
from .._core import logs
from .._core.display import text
from .._core.keys import Keys
from .._engine.commands import Pushed, read_push
from .._leases.lease import Lease
from .._scripts.constants import CONTENDED
from .._sharing.shared_grant import ProcessGrant
from ..errors import CoordinatorClosed, WrongContext
from .acquisition import Acquisition
from .queued import QueuedTickets
from .resource import HubServices, Resource

if TYPE_CHECKING:
    from .._leases.renewals import Renewals


class Hub(ABC):
    """Base of the coordinator, which is the hub of its names."""

    renewals: Renewals
    loop: asyncio.AbstractEventLoop
    _loop: asyncio.AbstractEventLoop | None = None
    """The same, once it is bound to one."""
    _thread = 0
    """In which that runs."""
    _forked = False

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, and after a fork in the child."""
        if self._thread == get_ident() and self.loop.is_running():
            return  # the same, told sooner: until Python 3.12 to ask for the running loop is a call to the system
        if self._forked:
            raise WrongContext(
                "this coordinator belongs to the parent process: after a fork create a new client and a new "
                "Coordinator in the child (or start children with the 'spawn' method)"
            )
        if self._loop is not None and self._loop is not running_loop():
            raise WrongContext(
                "this coordinator runs in another event loop: create one Coordinator per loop, and do not "
                "share locks made from it, nor leases, between loops or threads"
            )

    @abstractmethod
    def check(self) -> None:
        """Raise unless this coordinator may be used here and now."""

    server_id: bytes | None = None
    """The run_id of the server, as far as it was asked for; empty: it does not tell."""
    ahead_reported = False
    """Whether it was logged that its fences are far ahead of those of the other servers of a Redlock."""

    def _know_nothing(self) -> None:
        self._unchecked: set[int] = set()  # numbers of tickets that have not asked yet on the present connection
        self._rechecks = 0  # going on
        self.tickets: dict[int, Acquisition] = {}
        self.queued_tickets = QueuedTickets()
        self.bases: dict[
            int, ProcessGrant
        ] = {}  # by the number of the ticket they were granted to, until they have ended
        self.resources: dict[bytes, Resource] = {}  # by the id of their keys
        self._emptied: asyncio.Event | None = None
        """Set when nothing is held or waited for; there while it drains."""

    def resource(self, keys: Keys, spare: Resource | None = None) -> Resource:
        """Return the name as this process sees it; the coordinator must be `usable`.

        ``spare``: an object the caller had for this name before, used again if there is none. Raises CoordinatorClosed
        while the coordinator drains.
        """
        resource = self.resources.get(keys.id)
        if self._emptied is not None:
            raise CoordinatorClosed(f"the coordinator is being closed, and grants {text(keys.name)!r} no more")
        if resource is None:
            hub = cast(HubServices, self)
            if spare is not None and spare.hub is hub:
                resource = spare
                resource.endpoint = hub.endpoint_of(keys)
            else:
                resource = Resource(hub, keys)
            self.resources[keys.id] = resource
        return resource

    def known(self, keys: Keys) -> Resource | None:
        """Return the name as this process sees it; None when nobody here waits for it or holds it."""
        self.check()
        return self.resources.get(keys.id)

    def forget(self, resource: Resource) -> None:
        """Forget a name nobody waits for or holds."""
        if self.resources.get(resource.keys.id) is resource:
            del self.resources[resource.keys.id]
            if self._emptied is not None and not self.resources:
                self._emptied.set()

    def _every_name(self) -> Iterator[Resource]:
        left = [*reversed(self.resources.values())]
        while left:  # one after the other: to let go of many at a time takes long
            yield left.pop()

    def _all_leases(self) -> Iterator[Lease]:
        for resource in self._every_name():
            yield from resource.leases.all()

    def _keeps_lease(self, lease: Lease) -> bool:
        resource = self.resources.get(lease.keys.id)
        return resource is not None and resource.leases.keeps(lease)

    def _loosen_lease(self, lease: Lease) -> bool:
        resource = self.resources.get(lease.keys.id)
        return resource is not None and resource.loosen(lease)

    def _forget_lease(self, lease: Lease) -> None:
        resource = self.resources.get(lease.keys.id)
        if resource is not None:
            resource.drop(lease)
            if lease.reason in ("expired", "taken"):
                resource.look_now()

    # -- what the link tells of them -------------------------------------------------------------------

    def link_pushed(self, payload: bytes) -> None:
        """A message arrived in our inbox."""
        try:
            push = read_push(payload)
        except ValueError:
            logs.stray_message(payload)
            return
        try:
            self._dispatch(push)
        except Exception:  # the connection, and a talk that delivers this, are everybody's
            logs.useless_message(payload)

    def link_up(self, concerns: Callable[[Keys], bool]) -> None:
        """Ask a server with a new connection about all that is held there, then about all that waits there."""
        self._unchecked.update(self.tickets)
        self._rechecks += 1
        self.renewals.slices.run(self._recheck(concerns))

    def _recheck(self, concerns: Callable[[Keys], bool]) -> Iterator[None]:
        concerned: list[Resource] = []
        for resource in self._every_name():
            if concerns(resource.keys):
                concerned.append(resource)
                for lease in resource.leases.all():
                    self.renewals.recheck(lease)
                    yield
            yield
        yield from self._reroute()  # before they ask: the connection may have an inbox of its own
        for resource in concerned:
            for ticket in list(resource.tickets.values()):
                self._unchecked.discard(ticket.number)
                ticket.recheck()
                yield
        self._rechecks -= 1
        if not self._rechecks:
            self._unchecked.clear()

    def link_needed(self, concerns: Callable[[Keys], bool]) -> bool:
        """Return whether anything depends on a connection to a server."""
        return any(concerns(resource.keys) for resource in self.resources.values())

    def link_moved(self) -> None:
        """Some servers know us as something else now: grants, and word of who waits there, would not reach us."""
        self.renewals.slices.run(self._reroute())

    def _reroute(self) -> Iterator[None]:
        hub = cast(HubServices, self)
        for resource in self._every_name():
            endpoint = hub.endpoint_of(resource.keys)
            if endpoint != resource.endpoint:
                resource.endpoint = endpoint
                yield from resource.reroute()
            yield

    def _dispatch(self, push: Pushed) -> None:
        """Give a push to the ticket or the base it is for; give back what is granted to a ticket that is gone."""
        ticket = self.tickets.get(push.number)
        if push.fence == CONTENDED:
            if ticket is not None:  # what it wants is granted, as the answer will say
                ticket.contended = True
            elif (base := self.bases.get(push.number)) is not None:
                # It may be on its way back, and its name known anew; but this stands for all that we hold of the name.
                self.resources.get(base.keys.id, base.cohort.resource).on_contention()
        elif ticket is not None and push.number in self._unchecked and not ticket.withdrawn:
            ticket.recheck()  # it may be another server, with another clock
        elif ticket is not None:
            ticket.pushed(push)
        elif push.fence > 0:
            self._give_back_to_nobody(push.number)
        ticket = self.tickets.get(push.following) if push.following else None
        if ticket is not None and push.following not in self._unchecked:
            ticket.announced(push.server_time, push.next_duration)

    def _give_back_to_nobody(self, number: int) -> None:
        """Give back what was granted to a ticket that is gone, unless a lease of ours has come from that grant."""
        queued = self.queued_tickets.get(number)
        if queued is None:
            return
        resource = self.resources.get(queued.keys.id)
        leases = () if resource is None else resource.leases.all()
        if not any(lease.wire_token == queued.token and lease.attempt == queued.attempt for lease in leases):
            closing = (queued.attempt,) if queued.attempt else ()
            self.renewals.undo(queued.keys, queued.token, closing=closing)

    async def _drain(self, within: float) -> None:
        """End what waits, grant nothing, and wait ``within`` so many seconds until nothing is held."""
        self._emptied = asyncio.Event()
        self._stop_sharing()
        why = "the coordinator is being closed"
        self.renewals.slices.run(step for resource in self._every_name() for step in resource.give_up(why))
        await self.renewals.slices.done()
        self._give_back_resting()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.resources:
                    self._emptied.clear()
                    await self._emptied.wait()

    def _stop_sharing(self) -> None:
        """Nothing is handed on without a look at whether it is still allowed (`Cohort.thread`)."""
        for resource in self.resources.values():
            for cohort in resource.cohorts.values():
                cohort.thread = 0

    def _give_back_resting(self) -> bool:
        """Give back what is held and no task has; return whether there was anything."""
        resting = [base for resource in self.resources.values() for base in resource.resting()]
        for base in resting:
            base.cohort.give_back(base)
        return bool(resting)

    def _give_up(self, why: str) -> Iterator[None]:
        """End all that wait, and take all leases from those who have them."""
        for resource in self._every_name():
            yield from resource.give_up(why)
            yield
        for lease in self._all_leases():
            lease.interrupted = True
            self.renewals.release(lease)
            lease.lose("closed")
            yield
