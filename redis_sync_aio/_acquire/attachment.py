"""A request that takes up a lease which another process has detached, on the acquire path."""

from __future__ import annotations

import asyncio
from functools import partial

from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.futures import FutureLike
from .._engine.commands import Delivery
from .._leases.grant import Grant
from .._leases.terms import HELD
from .acquisition import Acquisition
from .owner import Owner
from .request import Request


class Attachment(Acquisition):
    """An acquisition that replaces the token of a detached lease by its own. It never waits.

    It is undone by putting the detached token back, so that the lease may be attached again.
    """

    def __init__(
        self, resource: Owner[Acquisition], request: Request, taker: FutureLike[Grant | None], replaced: bytes
    ) -> None:
        self._replaced = replaced
        super().__init__(resource, request, taker)

    def ask(self) -> None:
        """Send the request; a repetition finds what the first one did."""
        hub, self.sent = self._resource.hub, now()
        self.begun = self.begun or self.sent
        delivery = Delivery(self.sent, self.sent + hub.retry_for, self.answered)
        keys, ttl_ms = self._resource.keys, self._request.ttl_ms
        self.call = hub.engine.attach(keys, self.token, delivery, ttl_ms=ttl_ms, replaced=self._replaced)

    def task_cancelled(self, future: asyncio.Future[Grant | None]) -> None:
        """Put the detached token back: the task does not await ``future`` any more."""
        lease = self._lease
        if lease is not None and lease.state is HELD:
            future.cancel()
            self._resource.hub.manager.let_go(lease)
            self._undo_all()
        else:
            super().task_cancelled(future)

    def _granted(self, fence: int, since: float, duration: float, new: bool = True, previous: int = 0) -> None:
        if self.taker.done():  # cancelled, and its task has not run since
            self._leave()
            self._undo_all()
        else:
            super()._granted(fence, since, duration, new, previous)

    def _undo_all(self) -> None:
        resource = self._resource
        resource.hub.manager.releases.undo_attach(resource.keys, self.token, self._replaced, self._request.ttl_ms)


async def attach(resource: Owner[Acquisition], request: Request, replaced: bytes) -> Grant | None:
    """Attach for the current task what ``replaced`` holds: a lease, or None when it holds nothing."""
    future: asyncio.Future[Grant | None] = resource.hub.loop.create_future()
    attachment = Attachment(resource, request, future, replaced)
    attachment.ask()
    try:
        lease = await future
    except BaseException:
        undo_in(resource.hub.loop, partial(attachment.task_cancelled, future))
        raise
    if lease is not None and (task := asyncio.current_task(resource.hub.loop)) is not None:
        resource.leases.acquired(lease, task)
    return lease
