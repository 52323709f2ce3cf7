"""The latest tickets of this process that stood in a queue, so that a grant to one that is gone can be given back.

Such a grant comes from a queue that is older than the server's other data (`_transport.handshake`) where the server
says that nothing has changed: somebody restored its keys, or a proxy leads to another server. Or a copy of a request
was executed late. Nobody uses such a grant, so without this the name would stay taken for its whole `claim`.

The undo of a ticket that was just withdrawn may be in flight, and its grant is given back twice then. That is harmless:
no other request ever had its token, so the second release finds nothing to release.
"""

from __future__ import annotations

from typing import NamedTuple

from .._core.keys import Keys

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
