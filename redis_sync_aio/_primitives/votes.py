"""Requests to several servers at the same time, of which some may have no answer in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from .._acquire.acquisition import Acquisition
from .._acquire.request import Request
from .._acquire.resource import Resource
from .._core.cancellation import undo_in
from .._core.clock import now
from .._leases.grant import Grant
from ..errors import SyncError, Unreachable

T = TypeVar("T")

CHECK_INTERVAL = 0.01
"""So often, in seconds, it is looked whether those that have not answered are out of reach."""


class Vote:
    """One of them, on its way."""

    used = False
    """Somebody has its lease: it is not withdrawn."""

    def __init__(self, server: int, resource: Resource, request: Request) -> None:
        self.server = server  # which of them it is, from 0 on
        self.resource = resource
        self.future: asyncio.Future[Grant | None] = resource.hub.loop.create_future()
        self._acquisition = Acquisition(resource, request, self.future)
        self._acquisition.ask()

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
    def lease(self) -> Grant | None:
        """What was granted, as long as it is held."""
        lease = self.future.result() if self.answered else None
        return lease if lease is not None and lease.remaining() > 0 else None

    @property
    def connection_error(self) -> Exception | None:
        """Why there is no connection to the server, so that an answer is not to be expected."""
        return self.resource.hub.connection_error_of(self.resource.keys)

    def withdraw(self) -> None:
        """Undo what is not needed any more, in the background."""
        undo_in(self.resource.hub.loop, partial(self._acquisition.task_cancelled, self.future))


async def in_time(answer: Awaitable[T], within: float) -> T | SyncError:
    """Return the answer of one server, or why there is none ``within`` so many seconds: others may do without it."""
    try:
        async with asyncio.timeout(within):
            return await answer
    except TimeoutError:
        return Unreachable(f"a server did not answer within {within:g} seconds; check it and the network")
    except SyncError as error:
        return error


async def raise_fence(bid: Vote, lease: Grant, fence: int, within: float) -> bool:
    """Let the server of ``bid``, whose lease it is, grant none but higher fences; return whether it will.

    It has to answer ``within`` so many seconds. One round trip, unless its own is as high.
    """
    if lease.fence < fence:
        reserving = bid.resource.hub.manager.renewals.reserve(lease, fence - lease.fence)
        if await in_time(reserving, within) is not None:
            return False
    return bid.lease is lease


class Votes:
    """All of one attempt. When its ``with`` ends, those that are not used are withdrawn, and nothing stays of them."""

    def __init__(self, quorum: int, answer_within: float) -> None:
        self.all: list[Vote] = []
        self._quorum = quorum
        self._answer_within = answer_within

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bid in self.all:
            if not bid.used:
                bid.withdraw()

    def ask(self, server: int, resource: Resource, request: Request) -> Vote:
        """Ask one server more."""
        bid = Vote(server, resource, request)
        self.all.append(bid)
        return bid

    @property
    def granted(self) -> list[tuple[Vote, Grant]]:
        """Those that have a lease, and that."""
        return [(bid, lease) for bid in self.all if (lease := bid.lease) is not None]

    @property
    def suffice(self) -> bool:
        """Whether those are a majority."""
        return len(self.granted) >= self._quorum

    async def answers(self, ends: float) -> None:
        """Wait for all answers; not for longer than a server has, nor for those out of reach if the others suffice."""
        ends = min(ends, now() + self._answer_within)
        while missing := [bid for bid in self.all if not bid.future.done()]:
            left = ends - now()
            if left <= 0 or (self.suffice and all(bid.connection_error is not None for bid in missing)):
                return
            await asyncio.wait(
                [bid.future for bid in missing], timeout=min(left, CHECK_INTERVAL), return_when=asyncio.FIRST_COMPLETED
            )
