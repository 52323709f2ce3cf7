"""The hub: what all requests and leases of one client share in one event loop.

It knows every name that this process waits for or holds, and how to reach the server: over a link, or through the
client's pool. `link_events` handles the reports of the link, `closing` the end of the hub.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

from .._client.cluster import Cluster
from .._client.error_replies import with_own_errors
from .._client.owned import OwnedClient
from .._client.resp import Replies, Reply, Words
from .._client.settings import address_of, connect_timeout_of, running_loop
from .._client.topology import servers_of
from .._core import logs
from .._core.cancellation import outcome_of
from .._core.clock import now
from .._core.display import text
from .._core.flight import Flight
from .._core.keys import Endpoint, Keys, process_name
from .._core.observing import Observing
from .._engine.commands import Commands, Delivery, Send
from .._engine.watch import converse
from .._leases.grant import Grant
from .._leases.manager import GrantManager
from .._leases.settings import Exits, LeaseSettings
from .._transport.call import Call
from .._transport.cluster_link import ClusterLink
from .._transport.executor import Executor, LinkOptions
from .._transport.link import Link
from .._transport.owner import WeakOwner
from .._transport.pool_executor import PoolExecutor
from ..errors import CoordinatorClosed, SyncError, WrongContext
from .acquisition import Acquisition
from .closing import Closing, living
from .link_events import LinkEvents
from .options import HubOptions
from .queued import QueuedTickets
from .resource import ContentionListener, Resource

if TYPE_CHECKING:
    from .._core.observers import Observers
    from .._inspection.views import NameView

SHOWN = 100
"""Most holders and waiters that statistics list."""


class Hub:
    """The runtime of a coordinator, bound to the event loop that runs when it is made. Making it sends nothing."""

    server_id: bytes | None = None
    """The run_id of the server, once it was asked for; empty when the server does not say."""
    ahead_reported = False
    """Whether it was logged that its fences are far ahead of those of the other servers of a Redlock."""

    def __init__(self, options: HubOptions, owned: OwnedClient | None = None) -> None:
        """``owned``: the client, if it is closed with the hub."""
        self.options = options
        self.client = options.client
        self.claim_ms = options.claim_ms
        self.burst, self.slice = options.burst, options.slice
        self.retry_for = options.retry_for
        self.poll_cap, self.poll = options.poll_cap, options.poll
        self.loop = running_loop()
        self._thread = get_ident()
        self.forked = False
        """Whether this is a child of the process that made it."""
        self.asking = 0  # commands that `ask` waits for
        self.next_number = itertools.count(1).__next__
        """Return a number for the next acquisition."""
        self.acquisitions: dict[int, Acquisition] = {}
        self.queued_tickets = QueuedTickets()
        self.listeners: dict[int, ContentionListener] = {}
        """Receivers of contention notices, by the number of the ticket that they were granted to."""
        self.resources: dict[bytes, Resource] = {}  # by the id of their keys
        self.flights: dict[bytes, Flight] = {}
        """Calls of jobs that work for other calls of this process, by the id of their marks."""
        self.why_closed: str | None = None
        """The reason that it cannot be used any more; None while it can."""
        self.emptied: asyncio.Event | None = None
        """Set when nothing is held or waited for; there while the hub drains."""
        self.held_back: Callable[[], Awaitable[None]] | None = None
        """Function that a task awaits before it gets CoordinatorClosed from a drain."""

        self.observers: Observers | None = None
        """The observers of requests; None when there is none, so that nothing is made for them."""
        self.observing = Observing(self, partial(address_of, self.client), options.observers)

        self.servers = servers_of(self.client)
        self._endpoint = Endpoint.new(process_name(), secrets.token_hex(8), options.prefix)
        self.link_events = LinkEvents(self)
        self.link = None if options.push == "never" else self._new_link()
        self._use(self.link or self._new_pool_executor())
        self.manager = GrantManager(
            lambda: self.engine,
            leases=self.all_leases,
            forget=self._forget_lease,
            keeps=self._keeps_lease,
            check_context=self.check_context,
            stalled=self._stalled,
            settings=LeaseSettings(
                client=self.client,
                retry_for=self.retry_for,
                response_timeout=options.response_timeout,
                asked_response_timeout=options.asked_response_timeout,
                exits=Exits(options.exit_timeout),
            ),
        )
        self.closing = Closing(self, owned)

    # -- the way to the server -------------------------------------------------------------------------

    def _new_link(self) -> Link | ClusterLink:
        connect_timeout = connect_timeout_of(self.client, self.options.response_timeout)
        options = LinkOptions(self.options.response_timeout, connect_timeout, converse)
        owner = WeakOwner(self.link_events)
        if isinstance(self.servers, Cluster):
            return ClusterLink(self.servers, self._endpoint, owner, options)
        return Link(self.servers.clients()[0], self._endpoint, owner, options)

    def _new_pool_executor(self) -> PoolExecutor:
        return PoolExecutor(self.servers, self._endpoint, self.options.response_timeout, converse)

    def _use(self, executor: Executor) -> None:
        self.executor = executor
        self.engine = Commands(executor)
        self.pushes = executor.pushes
        self.endpoint_of = executor.endpoint_of
        self.connection_error_of = executor.connection_error_of
        self.poll_ms = 0 if self.pushes else max(2000, int(self.poll.cap * 4000))
        """Milliseconds for which a polling waiter's ticket stays alive between two looks."""

    def poll_instead(self, error: SyncError) -> None:
        """Use the client's pool from now on, since the link is refused."""
        link, self.link = self.link, None
        if link is None:
            return  # the link of another shard was refused first
        logs.polling_instead(error)
        self._use(self._new_pool_executor())
        self.link_events.link_moved()
        for call in link.detach():
            self.executor.send(call)

    async def ask(self, send: Send, *, goes_on: bool = False) -> Reply:
        """Run one command and return its reply. ``send`` sends it.

        On cancellation the command is not sent again and its answer is ignored. With ``goes_on`` it goes on in the
        background, and ``done`` is called.
        """
        self.check()
        outcome: asyncio.Future[Reply] = self.loop.create_future()

        def done(call: Call) -> None:
            if outcome.done():
                return
            if call.error is None:
                outcome.set_result(call.reply)
            else:
                outcome.set_exception(call.error)

        time = now()
        call = send(self.engine, Delivery(time, time + self.retry_for, done))
        self.next_number()  # a use, for the timer of an implicit hub
        self.asking += 1
        try:
            return await outcome_of(outcome)
        finally:
            self.asking -= 1
            if not goes_on:
                call.forget()

    async def read(self, keys: Keys, *commands: Words) -> Replies:
        """Run ``commands``, which only read ``keys``, at one moment; return the replies, that of TIME first."""
        return with_own_errors(await self.ask(lambda to, delivery: to.read(keys, commands, delivery)))

    async def look(self, keys: Keys, shown: int = SHOWN, *, whole: bool = True) -> NameView:
        """Return the view of a name: ``whole`` in two round trips, else in one, without details."""
        from .._inspection.over_link import look  # noqa: PLC0415

        self.check()
        return await look(self.read, self.servers, keys, shown, whole=whole)

    # -- whether it may be used ------------------------------------------------------------------------

    def usable(self) -> bool:
        """Return whether it may be used here and now; `check` says why not."""
        return self._thread == get_ident() and self.why_closed is None and self.loop.is_running()

    def check(self) -> None:
        """Raise WrongContext or CoordinatorClosed unless it may be used here and now."""
        self.check_context()
        if self.why_closed is not None:
            raise CoordinatorClosed.used(self.why_closed)

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, and after a fork in the child."""
        if self._thread == get_ident() and self.loop.is_running():
            return  # a shortcut: until Python 3.12, asking for the running loop is a system call
        if self.forked:
            raise WrongContext.forked()
        if self.loop is not running_loop():
            raise WrongContext.other_loop()

    def leave_to_parent(self) -> None:
        """Refuse all use in this process, which was forked from the one that made the hub."""
        self.forked, self._thread = True, 0
        self.observing.leave_to_parent()

    def _stalled(self, seconds: float) -> None:
        if self.observers is not None:
            self.observers.stalled(seconds)

    async def drained(self) -> None:
        """Wait until nothing is in flight, but not longer than closing may take."""
        await self.manager.releases.in_flight.drained(min(self.options.exit_timeout, self.options.response_timeout))

    def client_closed(self) -> None:
        """Close with the client, or its pool, which was closed."""
        self.closing.client_closed()

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self.client)}{'' if self.why_closed is None else ', closed'}>"

    # -- names -----------------------------------------------------------------------------------------

    def resource(self, keys: Keys, spare: Resource | None = None) -> Resource:
        """Return the name as this process sees it; the hub must be `usable`.

        ``spare``: an object the caller had for this name before, used again if there is none. Raises CoordinatorClosed
        while the hub drains.
        """
        resource = self.resources.get(keys.id)
        if self.emptied is not None:
            raise CoordinatorClosed.draining(text(keys.name), self.held_back)
        if resource is None:
            if spare is not None and spare.hub is self:
                resource = spare
                resource.endpoint = self.endpoint_of(keys)
            else:
                resource = Resource(self, keys)
            self.resources[keys.id] = resource
        return resource

    def known(self, keys: Keys) -> Resource | None:
        """Return the name as this process sees it; None when it is neither waited for nor held here."""
        self.check()
        return self.resources.get(keys.id)

    def forget(self, resource: Resource) -> None:
        """Forget a name that is neither waited for nor held."""
        if self.resources.get(resource.keys.id) is resource:
            del self.resources[resource.keys.id]
            if self.emptied is not None and not self.resources:
                self.emptied.set()

    def every_name(self) -> Iterator[Resource]:
        """Iterate over all names, the latest last, and refer to each only once."""
        left = [*reversed(self.resources.values())]
        while left:  # one after the other: freeing many objects together takes long
            yield left.pop()

    def held_elsewhere(self, resource: Resource) -> Iterator[Grant]:
        """Iterate over the leases of this loop on keys as those of ``resource``, of any client, engine and server."""
        ids = resource.keys.all_ids()
        for reference in living.valuerefs():
            closing = reference()
            if closing is None or closing.hub.loop is not self.loop:
                continue
            for found in map(closing.hub.resources.get, ids):
                if found is not None and found is not resource:
                    yield from found.held()

    def all_leases(self) -> Iterator[Grant]:
        """Iterate over all that the server granted to this process."""
        for resource in self.every_name():
            yield from list(resource.leases)

    def _keeps_lease(self, lease: Grant) -> bool:
        resource = self.resources.get(lease.keys.id)
        return resource is not None and lease in resource.leases

    def _forget_lease(self, lease: Grant) -> None:
        resource = self.resources.get(lease.keys.id)
        if resource is not None:
            resource.drop(lease)
            if lease.reason in ("expired", "taken"):
                resource.look_now()

    def stop_sharing(self) -> None:
        """Check before each hand-over inside the process whether it is still allowed."""
        for resource in self.resources.values():
            if resource.sharing is not None:
                resource.sharing.stop()

    def give_back_resting(self) -> bool:
        """Give back what is held and no task has; return whether there was anything."""
        shared = [resource.sharing for resource in self.resources.values() if resource.sharing is not None]
        return sum(sharing.rest_ends() for sharing in shared) > 0
