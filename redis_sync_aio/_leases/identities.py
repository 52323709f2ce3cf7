"""Requests of this process for one name that go by the same identity.

On the server they have one grant among them, so undoing one of them must not take from another what it has joined:

- While the answer to a cancelled request is in flight, the next request is sent after the undo.
- A grant that another request has joined, or may have joined because it was in flight already, is passed on to that
  request instead of undone. It is undone later if no lease comes of that.
- A grant from before a release of the identity is gone once the release is executed. Replies and pushes come in the
  order of execution, so such grants arrive between the sending of a release and its answer. They are asked for again.

Requests of other processes are not known here: the grant to a cancelled request is undone even if another process has
joined it meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .settings import LeaseState

if TYPE_CHECKING:
    from .acquisition import Acquisition
    from .grant import Grant
    from .resource import Resource


class IdentityRequests:
    """The requests for one name, by identity. The cost of one identity does not depend on the others."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._acquisitions: dict[bytes, dict[int, Acquisition]] = {}  # by identity, and by their numbers
        self._leases: dict[bytes, dict[Grant, None]] = {}
        self._behind: dict[bytes, list[Acquisition]] = {}  # not asked yet
        self._passed_on: set[bytes] = set()  # identities that have a grant here, and no lease yet
        self._releases: dict[bytes, int] = {}  # how many have no answer yet

    # -- what there is ---------------------------------------------------------------------------------

    def add(self, acquisition: Acquisition) -> None:
        """Register an acquisition under its present number."""
        self._acquisitions.setdefault(acquisition.token, {})[acquisition.number] = acquisition

    def remove(self, acquisition: Acquisition, number: int) -> None:
        """Forget an acquisition by that number. It may be one without an identity."""
        found = self._acquisitions.get(acquisition.token)
        if found is not None and found.pop(number, None) is not None:
            if not found:
                del self._acquisitions[acquisition.token]
            self.settle(acquisition.token)

    def hold(self, lease: Grant) -> None:
        """Register a lease."""
        lease.same_identity = self
        self._leases.setdefault(lease.wire_token, {})[lease] = None

    def drop(self, lease: Grant) -> None:
        """Forget a lease. It may be one without an identity."""
        found = self._leases.get(lease.wire_token)
        if found is not None and found.pop(lease, self) is None and not found:
            del self._leases[lease.wire_token]

    def leases_of(self, identity: bytes) -> list[Grant]:
        """Return the leases of an identity, the oldest first."""
        return list(self._leases.get(identity, ()))

    # -- releases --------------------------------------------------------------------------------------

    def release_sent(self, identity: bytes, at_least: int = 0) -> None:
        """End all leases of an identity (of such a weight): their common grant is being released, or downgraded."""
        self._releases[identity] = self._releases.get(identity, 0) + 1
        for lease in self.leases_of(identity):
            if lease.weight >= at_least:
                lease.reports_loss = lease.guards()  # else the task that releases may be all there is
                lease.lose("expired")

    def release_answered(self, identity: bytes) -> None:
        """Note that a release was executed, or that its answer is not awaited any more."""
        self._releases[identity] -= 1
        if not self._releases[identity]:
            del self._releases[identity]

    def is_gone(self, identity: bytes) -> bool:
        """Return whether a grant that arrives now ends by a release that follows it on the wire."""
        return identity in self._releases

    # -- cancelled requests ----------------------------------------------------------------------------

    def defer(self, acquisition: Acquisition) -> bool:
        """Return whether ``acquisition`` is asked later, behind the undoing of a cancelled one."""
        if not any(it.withdrawn and it.call is not None for it in self._of(acquisition.token)):
            return False
        behind = self._behind.setdefault(acquisition.token, [])
        if acquisition not in behind:
            behind.append(acquisition)
        return True

    def pass_on(self, token: bytes, fence: int, but: Grant | None = None) -> bool:
        """Return whether another lease than ``but``, or a request, of this identity takes over the grant ``fence``."""
        for lease in self.leases_of(token):  # one with another fence is gone, and has to learn that
            if lease.fence == fence and lease is not but and lease.state is LeaseState.HELD:
                lease.joined = False
                return True
        if not self._in_flight(token):
            return False
        self._passed_on.add(token)
        return True

    def inherits(self, acquisition: Acquisition) -> bool:
        """Return whether ``acquisition``, which has a lease now, is the only one that stands for the grant.

        Other requests by the same identity have it, too, without a message of the server: they ask again.
        """
        for other in self._of(acquisition.token):
            if other is not acquisition:
                other.recheck()
        passed_on = acquisition.token in self._passed_on
        self._passed_on.discard(acquisition.token)
        return passed_on

    def settle(self, identity: bytes) -> None:
        """Ask for the next ones, and undo what is left: an acquisition is gone, or a cancelled one has its answer."""
        for acquisition in self._behind.pop(identity, ()):
            known = self._acquisitions.get(identity, {}).get(acquisition.number) is acquisition
            if known and acquisition.call is None and not acquisition.withdrawn:
                acquisition.ask()
        if identity in self._passed_on and not self._in_flight(identity):
            self._passed_on.discard(identity)
            self._resource.undo(identity, b"")

    def _of(self, identity: bytes) -> list[Acquisition]:
        return list(self._acquisitions.get(identity, {}).values())

    def _in_flight(self, identity: bytes) -> bool:
        """Return whether a request of this identity is in flight and was not given up."""
        return any(it.call is not None and not it.withdrawn for it in self._of(identity))
