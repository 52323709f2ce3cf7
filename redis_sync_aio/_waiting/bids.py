"""Requests to several servers at once, of which some may have no answer in time."""

from __future__ import annotations

import asyncio

from ..errors import SyncError
from ..lease import Lease
from .local import LocalName
from .request import Request
from .ticket import Ticket


class Bid:
    """One of them, on its way. Unless its lease is ``used`` it has to be withdrawn, and nothing stays of it."""

    used = False

    def __init__(self, local: LocalName, request: Request) -> None:
        self.local = local
        self.future: asyncio.Future[Lease | None] = local.hub.loop.create_future()
        self._ticket = Ticket(local, request, self.future)
        self._ticket.ask()

    @property
    def error(self) -> SyncError | None:
        """Why there is no answer, if that is certain."""
        failed = self.future.done() and not self.future.cancelled()
        error = self.future.exception() if failed else None
        assert error is None or isinstance(error, SyncError)
        return error

    @property
    def answered(self) -> bool:
        """Whether the server said who has it."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    @property
    def lease(self) -> Lease | None:
        """What was granted, as long as it is held."""
        lease = self.future.result() if self.answered else None
        return lease if lease is not None and lease.remaining() > 0 else None

    @property
    def out_of_reach(self) -> bool:
        """Whether there is no connection to the server: an answer is not to be expected."""
        return self.local.hub.trouble is not None

    def withdraw(self) -> None:
        """Nobody wants it any more: undo it, in the background."""
        self.future.cancel()
        self._ticket.task_cancelled(self.future)
