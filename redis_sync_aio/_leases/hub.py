"""The hub: what all requests and leases of one client share in one event loop.

It knows every name that this process waits for or holds, and the link to the server. `link_events` handles the reports
of the link, `closing` the end of the hub.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import secrets
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakValueDictionary, finalize, ref

from .._client.address import OwnedClient
from .._client.cluster import Cluster, Topology, servers_of
from .._client.redis_py import CloseObserver, close_idle
from .._client.replies import Replies, Reply, Words, with_own_errors
from .._client.settings import RedisClient, address_of, connect_timeout_of, running_loop
from .._core import logs
from .._core.cancellation import outcome_of, wait_shielded
from .._core.clock import now
from .._core.display import text
from .._core.futures import Flight, finish
from .._core.keys import Endpoint, Keys, process_name
from .._core.observing import Observing
from .._engine.commands import Commands, Pushed, Send, read_push
from .._engine.watch import converse
from .._scripts.constants import CONTENDED
from .._transport.call import Call
from .._transport.cluster_link import ClusterLink
from .._transport.link import Link, LinkOptions
from ..errors import CoordinatorClosed, PushUnavailable, SyncError, WrongContext
from ..errors._base import copy_error
from .acquisition import Acquisition, QueuedTickets
from .grant import Grant
from .manager import GrantManager
from .options import HubOptions
from .resource import Resource
from .settings import Exits

if TYPE_CHECKING:
    from .._inspection.views import NameView
    from .shared_grant import ProcessGrant

# -- Reports of the link to the hub: pushes, new connections, slots that moved, refusals, a client that was closed


class LinkEvents:
    """The owner of a hub's link (`_transport.link.LinkOwner`), with a weak reference to the hub.

    The event loop keeps the connection, and with it the link and this object. Only callers, leases, waiting tasks and
    commands without a reply keep the hub. So a hub that is not used any more is collected, and its connection closed.
    """

    link: Link | ClusterLink
    """The present link."""

    def __init__(self, hub: Hub) -> None:
        self._hub = ref(hub)
        self._unchecked: set[int] = set()  # numbers of acquisitions that have not asked yet on the present connection
        self._rechecks = 0  # the work in progress

    # -- pushes ----------------------------------------------------------------------------------------

    def link_pushed(self, payload: bytes) -> None:
        """Take a message that arrived in our inbox."""
        if (hub := self._hub()) is None:
            return
        try:
            push = read_push(payload)
        except ValueError:
            logs.log("stray_message", payload=payload[:100])
            return
        try:
            self._dispatch(hub, push)
        except Exception as error:  # others use the connection and the dialogue that delivers this, too
            logs.log("useless_message", raised=error, payload=payload[:100])

    def _dispatch(self, hub: Hub, push: Pushed) -> None:
        """Give a push to its acquisition or listener; give back what is granted to a ticket that is gone."""
        acquisition = hub.acquisitions.get(push.number)
        if push.fence == CONTENDED:
            if acquisition is not None:  # its request is granted: the answer in flight says so
                acquisition.contended = True
            elif (listener := hub.listeners.get(push.number)) is not None:
                listener.on_contention()
        elif acquisition is not None and push.number in self._unchecked and not acquisition.withdrawn:
            acquisition.recheck()  # it may be another server, with another clock
        elif acquisition is not None:
            acquisition.pushed(push)
        elif push.fence > 0:
            _give_back_unclaimed(hub, push.number)
        acquisition = hub.acquisitions.get(push.following) if push.following else None
        if acquisition is not None and push.following not in self._unchecked:
            acquisition.announced(push.server_time, push.next_duration)

    # -- another connection, or another server ---------------------------------------------------------

    def link_lost(self, server: str) -> None:
        """Tell observers that a connection was lost."""
        if (hub := self._hub()) is not None and hub.observing.observers is not None:
            hub.observing.observers.connection_lost(server)

    def link_up(self, concerns: Callable[[Keys], bool], server: str, after: float | None) -> None:
        """Ask a server with a new connection about all that is held there, then about all that waits there."""
        if (hub := self._hub()) is None:
            return
        if hub.observing.observers is not None and after is not None:
            concerned = [resource for resource in hub.resources.values() if concerns(resource.keys)]
            number = sum(len(resource.leases) + len(resource.acquisitions) for resource in concerned)
            hub.observing.observers.connection_restored(server, after, number)
        self._unchecked.update(hub.acquisitions)
        self._rechecks += 1
        hub.manager.slices.run(self._recheck(hub, concerns))

    def _recheck(self, hub: Hub, concerns: Callable[[Keys], bool]) -> Iterator[None]:
        concerned: list[Resource] = []
        for resource in hub.every_name():
            if concerns(resource.keys):
                concerned.append(resource)
                for lease in list(resource.leases):
                    hub.manager.renewals.recheck(lease)
                    yield
            yield
        yield from _reroute(hub)  # before they ask: the connection may have an inbox of its own
        for resource in concerned:
            for acquisition in list(resource.acquisitions.values()):
                self._unchecked.discard(acquisition.number)
                acquisition.recheck()
                yield
        self._rechecks -= 1
        if not self._rechecks:
            self._unchecked.clear()

    def keys_in_use(self) -> Iterable[Keys]:
        """Return the keys of all names that are held or waited for."""
        return () if (hub := self._hub()) is None else (resource.keys for resource in hub.resources.values())

    def link_moved(self) -> None:
        """Queue again under the endpoints of new connections; pushes to the old ones do not arrive."""
        if (hub := self._hub()) is not None:
            hub.manager.slices.run(_reroute(hub))

    # -- no connection ---------------------------------------------------------------------------------

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        """Poll instead, or end what waits: a server, or the user's rights there, do not allow the link."""
        if (hub := self._hub()) is None:
            return
        if hub.pushes and hub.options.push == "auto" and isinstance(error, PushUnavailable):
            hub.poll_instead(error)
            return
        for resource in list(hub.resources.values()):
            for acquisition in list(resource.acquisitions.values()) if concerns(resource.keys) else ():
                acquisition.withdraw(copy_error(error))

    async def link_closing(self) -> None:
        """Give back what no task has, before the client closes our connection."""
        hub = self._hub()
        if hub is None or hub.forked or hub.loop is not running_loop():
            return
        if hub.give_back_resting():
            await hub.drained()

    def link_client_closed(self) -> None:
        """Close the hub: the client or its pool was closed, and with it our connection if there is one."""
        if (hub := self._hub()) is not None:
            hub.closing.client_closed()


def _give_back_unclaimed(hub: Hub, number: int) -> None:
    """Give back what was granted to a ticket that is gone, unless a lease of ours has come from that grant."""
    queued = hub.queued_tickets.get(number)
    if queued is None:
        return
    resource = hub.resources.get(queued.keys.id)
    leases = () if resource is None else list(resource.leases)
    if not any(lease.wire_token == queued.token for lease in leases):
        hub.manager.releases.undo(queued.keys, queued.token)


def _reroute(hub: Hub) -> Iterator[None]:
    """Queue again under the endpoints of new connections, one acquisition with each step."""
    for resource in hub.every_name():
        endpoint = hub.endpoint_of(resource.keys)
        if endpoint != resource.endpoint:
            resource.endpoint = endpoint
            yield from resource.reroute()
        yield


# -- The end of a hub: by `Coordinator.aclose`, idle, with its client or its event loop, in a forked child, or dropped


IDLE = 5.0
"""Seconds without any use after which an implicit hub closes."""
AFTER_DRAIN = 0.05
"""Seconds after a drain in which the body of `UntilSignal` cancels its tasks. Those that are left get their errors."""

hubs: dict[tuple[int, int], Hub] = {}
"""The implicit hubs by the ids of client and loop, which they keep alive. (Clients may be equal, or not hashable.)"""
living: WeakValueDictionary[int, Closing] = WeakValueDictionary()
"""The ends of all hubs of this process, by their ids. (`valuerefs` copies them in one step, whatever threads do.)"""
begun: set[Closing] = set()
"""Closings in progress. They keep an implicit hub alive after `asyncio.run` has cancelled its closing task, until the
end of the loop's asynchronous generators begins it again."""


class Closing:
    """Ends a hub once, for the first reason that comes up."""

    task: asyncio.Task[None] | None = None
    """The task that closes the hub; None until that begins."""
    idle: asyncio.TimerHandle | None = None
    """The timer of an implicit hub, which closes when it is not used; None for the hub of a coordinator."""
    _client_is_closed = False

    def __init__(self, hub: Hub, owned: OwnedClient | None) -> None:
        self.hub: Hub = hub
        self._owned = owned
        self._witness = CloseObserver(hub.servers.clients()[0], self._client_closes)
        self._dropped = finalize(self, _dropped, repr(hub), hub.loop, hub.link_events, owned)
        self._dropped.atexit = False
        self._loop_end = _at_loop_end(ref(self))
        with suppress(StopIteration):  # run to its first yield, which registers it with the loop
            self._loop_end.asend(None).send(None)
        living[id(self)] = self

    async def close(self, drain: float) -> None:
        """Let bodies keep running for ``drain`` seconds, then end what is left; see `Coordinator.aclose`."""
        hub = self.hub
        if hub.forked:
            hub.why_closed = hub.why_closed or "it was closed"
            return
        hub.check_context()
        try:
            if drain and hub.why_closed is None:
                await self.drain(drain)
        finally:
            await wait_shielded(self.begin("it was closed"))  # bounded by `Hub.drained` and the close of connections

    def begin(self, why: str) -> asyncio.Task[None]:
        """Close the hub in the background, for the reason ``why`` if there is no other; return the task."""
        hub = self.hub
        if self.task is None or self.task.cancelled():  # `asyncio.run` cancels all tasks at its end
            hub.why_closed = hub.why_closed or why
            self._leave()
            begun.difference_update([one for one in list(begun) if one.hub.loop.is_closed()])  # cut off in the middle
            begun.add(self)
            # Not by the loop's factory: an eager task would end the loop's generator before it is known here.
            self.task = asyncio.Task(self._close(), loop=hub.loop, name="redis_sync_aio close")
            hub.manager.slices.stop()
            hub.manager.slices.run(self._give_up(f"the coordinator cannot be used any more: {hub.why_closed}"))
        return self.task

    def _leave(self) -> None:
        """Hide the hub: it can no longer be used."""
        hub = self.hub
        hub.hands_on = False
        if self.idle is not None:
            self.idle.cancel()  # it would keep the hub and its client alive for that long
        if hubs.get(key := (id(hub.client), id(hub.loop))) is hub:
            del hubs[key]

    async def _close(self) -> None:
        hub = self.hub
        await hub.manager.slices.done()
        hub.manager.stop()
        await hub.drained()
        await hub.link.close()
        hub.observing.close()
        self._witness.leave()
        if self._client_is_closed:
            for client in hub.servers.clients():
                await close_idle(client)
        try:
            if self._owned is not None:
                await wait_shielded(self._owned.start_closing())
        finally:
            self._dropped.detach()
            with suppress(RuntimeError):  # it is running: it closes the coordinator at the end of the loop
                await self._loop_end.aclose()
            begun.discard(self)

    async def drain(self, within: float, *, hold_back: bool = False) -> None:
        """End all waits, grant nothing, and wait until nothing is held, for ``within`` seconds at most.

        ``hold_back``: tasks that hold nothing get their errors at the end of that time.
        """
        hub, over = self.hub, asyncio.Event()
        emptied = hub.emptied = hub.emptied or asyncio.Event()  # others may drain it, too
        if hold_back:
            hub.held_back = partial(self._held_back, over)
        try:
            hub.hands_on = False
            why = "the coordinator is being closed"
            hub.manager.slices.run(step for resource in hub.every_name() for step in resource.give_up(why))
            await hub.manager.slices.done()
            for lease in list(hub.all_leases()):
                if lease.ends_with_drain:
                    hub.manager.take_away(lease)
            hub.give_back_resting()
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    while hub.resources:
                        emptied.clear()
                        await emptied.wait()
        finally:
            over.set()

    async def _held_back(self, over: asyncio.Event) -> None:
        """Wait for the end of a drain, unless the current task holds something, which it could not release then."""
        task = asyncio.current_task()
        held = (grant for resource in self.hub.every_name() for grant in resource.held())
        if not any(grant.acquirer is not None and grant.acquirer() is task for grant in held):
            await over.wait()
            await asyncio.sleep(AFTER_DRAIN)

    def _give_up(self, why: str) -> Iterator[None]:
        """End all waits, and take all leases from their holders."""
        hub = self.hub
        for resource in hub.every_name():
            yield from resource.give_up(why)
            yield
        for lease in hub.all_leases():
            hub.manager.take_away(lease)
            yield

    # -- ends without a call of close --------------------------------------------------------------------

    def look_later(self) -> None:
        """Close the hub after some time in which it is not used: it is an implicit one."""
        self.idle = self.hub.loop.call_later(IDLE, self._look, self.hub.uses)

    def _look(self, uses: int) -> None:
        close_orphans()
        hub = self.hub
        if hub.resources or hub.asking or hub.uses > uses:
            self.look_later()
        else:
            self.begin("it was idle")

    def client_closed(self) -> None:
        """Close with the client, or its pool, which was closed."""
        hub = self.hub
        if hub.forked or hub.why_closed is not None or hub.loop is not running_loop():
            return
        self._client_is_closed = True
        self.begin("its client was closed (aclose(), or disconnect() of its pool); create a new client")

    def _client_closes(self) -> None:
        """Close with the client, unless a link is up: that notices it once its own connection is closed."""
        link = self.hub.link
        if link.connections == 0 or link.connection_error is not None:
            self.client_closed()

    def after_fork(self) -> None:
        """Leave everything to the parent process. The sockets are its own: never use or close them here."""
        self.hub.leave_to_parent()
        self._stop_at_once()
        self.hub.link.after_fork()

    def close_without_loop(self) -> None:
        """Give up the connection: the event loop was closed without notice."""
        self.hub.why_closed = self.hub.why_closed or "its event loop was closed"
        self._stop_at_once()
        self.hub.observing.close()
        self.hub.link.close_without_loop()

    def _stop_at_once(self) -> None:
        begun.discard(self)
        self._leave()
        self._dropped.detach()
        self.hub.manager.stop()
        self._witness.leave()


async def _at_loop_end(closing: ReferenceType[Closing]) -> AsyncGenerator[None, None]:
    """Close when the loop ends. Nothing runs after that, so finish a closing that has begun.

    `asyncio.run`, and all that uses `asyncio.Runner`, cancels all tasks, lets them finish, and then closes the
    asynchronous generators that were started. So do uvloop and aiohttp. That is the right moment: tasks could release
    in their clean-up, and no task of ours has to be cancelled to notice it.
    """
    try:
        yield
    finally:
        found = closing()
        if found is not None and found.task is not asyncio.current_task():  # else that closing no longer needs it
            await found.close(0.0)


def _dropped(shown: str, loop: asyncio.AbstractEventLoop, events: LinkEvents, owned: OwnedClient | None) -> None:
    """Warn that a coordinator was collected, and close its connections; runs in any thread."""
    if not loop.is_running():  # it may never run again
        events.link.close_without_loop()
    with suppress(RuntimeError):  # its loop is closed
        loop.call_soon_threadsafe(events.link.detach)
        if owned is not None:
            loop.call_soon_threadsafe(owned.start_closing)
    warnings.warn(logs.coordinator_dropped(shown), ResourceWarning, stacklevel=2)


def close_orphans() -> None:
    """Close implicit hubs whose event loop was closed without letting its asynchronous generators end first."""
    for key, found in list(hubs.items()):  # a copy: other threads have loops and hubs, too
        if found.loop.is_closed() and (dead := hubs.pop(key, None)) is not None:
            dead.closing.close_without_loop()


def _after_fork_in_child() -> None:
    hubs.clear()
    for closing in living.valuerefs():
        if (found := closing()) is not None:
            found.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


# -- The hub


SHOWN = 100
"""Most holders and waiters that statistics list."""


class Hub:
    """The runtime of a coordinator, bound to the event loop that runs when it is made. Making it sends nothing."""

    clock_ahead: float | None = None
    """The seconds by which the clock of the server is ahead of the local one, at most; None: not known."""
    clock_asked: float = -math.inf
    """The local time of that question."""
    late = 0
    """Number of times in a row that it answered too late as the first server of a Redlock."""
    ask_again_at: float = -math.inf
    """The local time when a Redlock asks it again although it is silent."""
    history = b""
    """The id of the history of the server's data, if its link does not ask for it."""
    ahead_reported = False
    """True if it was logged that its fences are far ahead of those of the other servers of a Redlock."""
    met_later_layout = False
    """True if a ticket of a later layout was met, and logged."""

    def __init__(self, options: HubOptions, owned: OwnedClient | None = None) -> None:
        """``owned``: the client, if it is closed with the hub."""
        self.options = options
        self.client: RedisClient = options.client
        self.claim_ms: int = options.claim_ms
        self.retry_for: float = options.retry_for
        self.loop: asyncio.AbstractEventLoop = running_loop()
        self._thread = get_ident()
        self.forked: bool = False
        """True if this is a child of the process that made it."""
        self.hands_on: bool = True
        """True while tasks may hand grants to each other: until it drains, or ends."""
        self.asking: int = 0  # commands that `ask` waits for
        self.uses: int = 0
        """Number of requests and questions so far, for the timer of an implicit hub."""
        self.next_number: Callable[[], int] = itertools.count(1).__next__
        """Return a number for the next acquisition."""
        self.acquisitions: dict[int, Acquisition] = {}
        self.queued_tickets: QueuedTickets = QueuedTickets()
        self.listeners: dict[int, ProcessGrant] = {}
        """Receivers of contention notices, by the number of the ticket that they were granted to."""
        self.resources: dict[bytes, Resource] = {}  # by the id of their keys
        self.flights: dict[bytes, Flight] = {}
        """Calls of jobs that work for other calls of this process, by the id of their marks."""
        self.why_closed: str | None = None
        """The reason that it cannot be used any more; None while it can."""
        self.emptied: asyncio.Event | None = None
        """Exists while draining; set when nothing is held or awaited."""
        self.held_back: Callable[[], Awaitable[None]] | None = None
        """Function that a task awaits before it gets CoordinatorClosed from a drain."""

        self.observing: Observing = Observing(self.loop, partial(address_of, self.client), options.observers)

        self.servers: Topology = servers_of(self.client)
        self._endpoint = Endpoint.new(process_name(), secrets.token_hex(8), options.prefix)
        self.link_events: LinkEvents = LinkEvents(self)
        self._use(self._endpoint.polling() if options.push == "never" else self._endpoint)
        self.exits: Exits = Exits(options.exit_timeout)
        self.manager: GrantManager = GrantManager(self)
        self.closing: Closing = Closing(self, owned)

    # -- the way to the server -------------------------------------------------------------------------

    def _use(self, endpoint: Endpoint) -> None:
        """Use a new link from now on. One whose ``endpoint`` has no inbox polls."""
        self.link: Link | ClusterLink = self._new_link(endpoint)
        self.link_events.link = self.link
        self.commands: Commands = Commands(self.link)
        self.pushes: bool = bool(endpoint.inbox)
        self.endpoint_of: Callable[[Keys], Endpoint] = self.link.endpoint_of
        self.connection_error_of: Callable[[Keys], Exception | None] = self.link.connection_error_of
        self.poll_ms: int = 0 if self.pushes else max(2000, int(self.options.poll.cap * 4000))
        """Milliseconds for which a polling waiter's ticket stays alive between two looks."""

    def _new_link(self, endpoint: Endpoint) -> Link | ClusterLink:
        connect_timeout = connect_timeout_of(self.client, self.options.response_timeout)
        options = LinkOptions(self.options.response_timeout, connect_timeout, converse)
        if isinstance(self.servers, Cluster):
            return ClusterLink(self.servers, endpoint, self.link_events, options)
        return Link(self.servers.clients()[0], endpoint, self.link_events, options)

    def poll_instead(self, error: SyncError) -> None:
        """Poll from now on, since the server, or the user's rights there, do not allow pushes."""
        link = self.link
        logs.log("polling_instead", why=error)
        self._use(self._endpoint.polling())
        self.link_events.link_moved()
        for call in link.detach():
            self.link.send(call)

    async def ask(self, send: Send, *, goes_on: bool = False) -> Reply:
        """Run one command and return its reply. ``send`` sends it.

        On cancellation the command is not sent again and its answer is ignored. With ``goes_on`` it continues in the
        background, and ``done`` is called.
        """
        self.check()
        outcome: asyncio.Future[Reply] = self.loop.create_future()

        def done(call: Call) -> None:
            finish(outcome, call.reply, call.error)

        time = now()
        call = Call(time, time + self.retry_for, done)
        send(self.commands, call)
        self.uses += 1
        self.asking += 1
        try:
            return await outcome_of(outcome)
        finally:
            self.asking -= 1
            if not goes_on:
                call.forget()

    async def read(self, keys: Keys, *commands: Words) -> Replies:
        """Run ``commands``, which only read ``keys``, at one moment; return the replies, that of TIME first."""
        return with_own_errors(await self.ask(lambda to, call: to.read(keys, commands, call)))

    async def look(self, keys: Keys, shown: int = SHOWN, *, whole: bool = True) -> NameView:
        """Return the view of a name: ``whole`` in two round trips, else in one, without details."""
        from .._inspection.reading import look  # noqa: PLC0415

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

    def draining_error(self, why: str) -> CoordinatorClosed:
        """Return the error for a request that a drain refuses or ends, to be raised when the drain says so."""
        error = CoordinatorClosed(why)
        error._held_back = self.held_back
        return error

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, and after a fork in the child."""
        if self._thread == get_ident() and self.loop.is_running():
            return  # a shortcut: until Python 3.12, asking for the running loop is a system call
        if self.forked:
            raise WrongContext(
                "this coordinator belongs to the parent process: after a fork create a new client and a new "
                "Coordinator in the child (or start children with the 'spawn' method)"
            )
        if self.loop is not running_loop():
            raise WrongContext(
                "this coordinator runs in another event loop: create one Coordinator per loop, and do not share "
                "locks made from it, nor leases, between loops or threads"
            )

    def leave_to_parent(self) -> None:
        """Refuse all use in this process, which was forked from the one that made the hub."""
        self.forked, self._thread = True, 0
        self.observing.leave_to_parent()

    def stalled(self, seconds: float) -> None:
        """Report to observers that the event loop was blocked for ``seconds``."""
        if (observers := self.observing.observers) is not None:
            observers.stalled(seconds)

    async def drained(self) -> None:
        """Wait until nothing is in flight, but not longer than closing may take."""
        await self.manager.releases.in_flight.drained(min(self.options.exit_timeout, self.options.response_timeout))

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self.client)}{'' if self.why_closed is None else ', closed'}>"

    # -- names -----------------------------------------------------------------------------------------

    def resource(self, keys: Keys, spare: Resource | None = None) -> Resource:
        """Return the name as this process sees it; the hub must be `usable`.

        ``spare``: an object the caller had for this name before, used again if there is none. Raises CoordinatorClosed
        while the hub drains.
        """
        self.uses += 1
        resource = self.resources.get(keys.id)
        if self.emptied is not None:
            why = f"the coordinator is being closed and grants {text(keys.name)!r} no longer: create a new one"
            raise self.draining_error(why)
        if resource is None:
            if spare is not None and spare.hub is self:
                resource = spare
                resource.endpoint = self.endpoint_of(keys)
            else:
                resource = Resource(self, keys)
            self.resources[keys.id] = resource
        return resource

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

    def keeps(self, lease: Grant) -> bool:
        """Return True if ``lease`` is held."""
        resource = self.resources.get(lease.keys.id)
        return resource is not None and lease in resource.leases

    def forget_lease(self, lease: Grant) -> None:
        """Forget ``lease``, which has ended; look again if others may hold its name now."""
        resource = self.resources.get(lease.keys.id)
        if resource is not None:
            resource.drop(lease)
            if lease.reason in ("expired", "taken"):
                resource.look_now()

    def give_back_resting(self) -> bool:
        """Give back what is held and no task has; return whether there was anything."""
        cohorts = [cohort for resource in self.resources.values() for cohort in resource.cohorts.values()]
        resting = [(cohort, grant) for cohort in cohorts for grant in cohort.resting]
        for cohort, grant in resting:
            cohort.give_back(grant)
        return bool(resting)
