"""Requests of this process for one name that go by the same identity.

On the server they have one grant among them, so undoing one of them must not take from another what it has joined:

- Who asks while the answer to a cancelled one is on its way asks behind what undoes that.
- What another one has joined, or may have because it was under way already, is passed on to it instead of undone. If
  no lease comes of that it is undone then.

Of other processes nothing is known here. What a cancelled request was granted is undone also when another process has
joined it meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lease import Lease, State

if TYPE_CHECKING:
    from .local import LocalName
    from .ticket import Ticket


class Namesakes:
    """Of one name, for all identities."""

    def __init__(self, local: LocalName) -> None:
        self._local = local
        self._behind: list[Ticket] = []  # not asked yet
        self._passed_on: set[bytes] = set()  # identities that have a grant here, and no lease yet

    def defer(self, ticket: Ticket) -> bool:
        """Return whether ``ticket`` is asked later, behind the undoing of a cancelled one."""
        mine = ticket.token
        if not any(it.withdrawn and it.call is not None and it.token == mine for it in self._local.tickets.values()):
            return False
        if ticket not in self._behind:
            self._behind.append(ticket)
        return True

    def pass_on(self, token: bytes, fence: int, but: Lease | None = None) -> bool:
        """Return whether another lease than ``but``, or a request, of this identity takes over the grant ``fence``."""
        for lease in self._local.leases:
            same = lease.wire_token == token and lease.fence == fence  # else it is gone, and has to learn that
            if same and lease is not but and lease.state is State.HELD:
                lease.joined = False
                return True
        if not self._under_way(token):
            return False
        self._passed_on.add(token)
        return True

    def inherits(self, ticket: Ticket) -> bool:
        """``ticket`` has a lease now: return whether it is the only one that stands for the grant.

        Who else waits by the same identity has it, too, and is not told by the server: they ask again.
        """
        token = ticket.token
        for other in list(self._local.tickets.values()):
            if other.token == token and other is not ticket:
                other.recheck()
        passed_on = token in self._passed_on
        self._passed_on.discard(token)
        return passed_on

    def settle(self) -> None:
        """A ticket is gone, or a cancelled one has its answer: see who comes next, and what is left."""
        behind, self._behind = self._behind, []
        for ticket in behind:
            if self._local.tickets.get(ticket.number) is ticket and ticket.call is None and not ticket.withdrawn:
                ticket.ask()
        for token in [token for token in self._passed_on if not self._under_way(token)]:
            self._passed_on.discard(token)
            self._local.undo(token, b"")

    def _under_way(self, token: bytes) -> bool:
        """Return whether the answer to a request of this identity is on its way, and wanted."""
        return any(
            it.token == token and it.call is not None and not it.withdrawn for it in self._local.tickets.values()
        )
