"""Requests, leases and releases of one name by the same identity, in this process.

On the server they have one grant among them, so undoing one of them must not take from another what it has joined:

- The grant to a cancelled request belongs to the leases that have joined it. Without one it is released.
- A release of the identity, or the undo of a request, ends all grants before it. Replies and pushes come in the order
  of execution, so such grants arrive between the sending of the release and its answer. They are asked for again.

Requests of other processes are not known here: the grant to a cancelled request is undone even if another process has
joined it meanwhile.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from .settings import HELD

if TYPE_CHECKING:
    from .._transport.call import Call
    from .acquisition import IdentityAcquisition
    from .grant import Grant
    from .resource import Resource

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """Objects by identity, the oldest first. The cost of one identity does not depend on the others."""

    def __init__(self) -> None:
        self._found: dict[bytes, dict[T, None]] = {}

    def add(self, identity: bytes, one: T) -> None:
        """Add an object of ``identity``."""
        self._found.setdefault(identity, {})[one] = None

    def discard(self, identity: bytes, one: T) -> None:
        """Remove an object of ``identity`` if it is there."""
        if (found := self._found.get(identity)) is not None:
            found.pop(one, None)
            if not found:
                del self._found[identity]

    def of(self, identity: bytes) -> list[T]:
        """Return the objects of ``identity``."""
        return list(self._found.get(identity, ()))


class IdentityRequests:
    """The requests for one name, its leases and its releases, by identity."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self.requests: ByIdentity[IdentityAcquisition] = ByIdentity()
        self.leases: ByIdentity[Grant] = ByIdentity()
        self._releases: Counter[bytes] = Counter()  # how many have no answer yet

    def release_sent(self, identity: bytes, at_least: int = 0) -> None:
        """End all leases of an identity (of such a weight): their common grant is being released, or downgraded."""
        self._releases[identity] += 1
        for lease in self.leases.of(identity):
            if lease.weight >= at_least:
                lease.reports_loss = lease.guards()  # else the task that releases may be all there is
                lease.lose("expired")

    def release_answered(self, identity: bytes) -> None:
        """Note that a release was executed, or that its answer is not awaited any more."""
        self._releases[identity] -= 1
        if not self._releases[identity]:
            del self._releases[identity]

    def end_by(self, identity: bytes, call: Call, at_least: int = 0) -> None:
        """End all leases of an identity (of such a weight) by ``call``, which is sent next."""
        then = call.done

        def done(call: Call) -> None:
            self.release_answered(identity)
            then(call)

        self.release_sent(identity, at_least)
        call.done = done

    def is_gone(self, identity: bytes) -> bool:
        """Return True if a grant that arrives now ends by a release that follows it on the wire."""
        return identity in self._releases

    def take_over(self, identity: bytes, fence: int, but: Grant | None = None) -> bool:
        """Let another lease than ``but`` end the grant ``fence``; return False if none has it."""
        for lease in self.leases.of(identity):
            if lease.fence == fence and lease is not but and lease.state is HELD:
                lease.joined = False
                return True
        return False

    def undo(self, identity: bytes, ticket: bytes) -> None:
        """Release a grant that no lease has, and withdraw the ticket of its request."""
        self.release_sent(identity)
        self._resource.undo(identity, ticket, done=lambda _: self.release_answered(identity))
