"""Reports of the link to the hub: pushes, new connections, slots that moved, refusals, a client that was closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .._client.settings import running_loop
from .._core import logs
from .._core.keys import Keys
from .._engine.replies import Pushed, read_push
from .._scripts.constants import CONTENDED
from ..errors import PushUnavailable, SyncError
from ..errors._base import copy_error
from .options import HubOptions
from .resource import HubServices, Resource


class LinkedHub(HubServices, Protocol):
    """A hub, as the owner of its link knows it."""

    options: HubOptions
    resources: dict[bytes, Resource]
    forked: bool

    def every_name(self) -> Iterator[Resource]: ...
    def poll_instead(self, error: SyncError) -> None: ...
    def give_back_resting(self) -> bool: ...
    async def drained(self) -> None: ...
    def client_closed(self) -> None: ...


class LinkEvents:
    """The owner of a hub's link (`_transport.executor.LinkOwner`)."""

    def __init__(self, hub: LinkedHub) -> None:
        self._hub = hub
        self._unchecked: set[int] = set()  # numbers of acquisitions that have not asked yet on the present connection
        self._rechecks = 0  # the work in progress

    # -- pushes ----------------------------------------------------------------------------------------

    def link_pushed(self, payload: bytes) -> None:
        """Take a message that arrived in our inbox."""
        try:
            push = read_push(payload)
        except ValueError:
            logs.stray_message(payload)
            return
        try:
            self._dispatch(push)
        except Exception:  # others use the connection and the dialogue that delivers this, too
            logs.useless_message(payload)

    def _dispatch(self, push: Pushed) -> None:
        """Give a push to its acquisition or listener; give back what is granted to a ticket that is gone."""
        hub = self._hub
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
            self._give_back_to_nobody(push.number)
        acquisition = hub.acquisitions.get(push.following) if push.following else None
        if acquisition is not None and push.following not in self._unchecked:
            acquisition.announced(push.server_time, push.next_duration)

    def _give_back_to_nobody(self, number: int) -> None:
        """Give back what was granted to a ticket that is gone, unless a lease of ours has come from that grant."""
        queued = self._hub.queued_tickets.get(number)
        if queued is None:
            return
        resource = self._hub.resources.get(queued.keys.id)
        leases = () if resource is None else list(resource.leases)
        if not any(lease.wire_token == queued.token for lease in leases):
            self._hub.manager.releases.undo(queued.keys, queued.token)

    # -- another connection, or another server ---------------------------------------------------------

    def link_lost(self, server: str) -> None:
        """Tell observers that a connection was lost."""
        if self._hub.observers is not None:
            self._hub.observers.connection_lost(server)

    def link_up(self, concerns: Callable[[Keys], bool], server: str, after: float | None) -> None:
        """Ask a server with a new connection about all that is held there, then about all that waits there."""
        if self._hub.observers is not None and after is not None:
            concerned = [resource for resource in self._hub.resources.values() if concerns(resource.keys)]
            number = sum(len(resource.leases) + len(resource.acquisitions) for resource in concerned)
            self._hub.observers.connection_restored(server, after, number)
        self._unchecked.update(self._hub.acquisitions)
        self._rechecks += 1
        self._hub.manager.slices.run(self._recheck(concerns))

    def _recheck(self, concerns: Callable[[Keys], bool]) -> Iterator[None]:
        hub = self._hub
        concerned: list[Resource] = []
        for resource in hub.every_name():
            if concerns(resource.keys):
                concerned.append(resource)
                for lease in list(resource.leases):
                    hub.manager.renewals.recheck(lease)
                    yield
            yield
        yield from self._reroute()  # before they ask: the connection may have an inbox of its own
        for resource in concerned:
            for acquisition in list(resource.acquisitions.values()):
                self._unchecked.discard(acquisition.number)
                acquisition.recheck()
                yield
        self._rechecks -= 1
        if not self._rechecks:
            self._unchecked.clear()

    def keys_in_use(self) -> Iterator[Keys]:
        """Return the keys of all names that are held or waited for."""
        return (resource.keys for resource in self._hub.resources.values())

    def link_moved(self) -> None:
        """Queue again under the endpoints of new connections; pushes to the old ones do not arrive."""
        self._hub.manager.slices.run(self._reroute())

    def _reroute(self) -> Iterator[None]:
        for resource in self._hub.every_name():
            endpoint = self._hub.endpoint_of(resource.keys)
            if endpoint != resource.endpoint:
                resource.endpoint = endpoint
                yield from resource.reroute()
            yield

    # -- no connection ---------------------------------------------------------------------------------

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        """Poll instead, or end what waits: a server, or the user's rights there, do not allow the link."""
        hub = self._hub
        if hub.options.push == "auto" and isinstance(error, PushUnavailable):
            hub.poll_instead(error)
            return
        for resource in list(hub.resources.values()):
            for acquisition in list(resource.acquisitions.values()) if concerns(resource.keys) else ():
                acquisition.withdraw(copy_error(error))

    async def link_closing(self) -> None:
        """Give back what no task has, before the client closes our connection."""
        hub = self._hub
        if hub.forked or hub.loop is not running_loop():
            return
        if hub.give_back_resting():
            await hub.drained()

    def link_client_closed(self) -> None:
        """Close the hub: the client or its pool was closed, and with it our connection if there is one."""
        self._hub.client_closed()
