"""Requests to several servers at the same time, some of which may not answer in time."""

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
"""Seconds between checks for servers that are out of reach."""


class Vote:
    """A request to one server, in flight or answered."""

    used = False
    """Whether its grant is in use, so that it is not withdrawn."""

    def __init__(self, server: int, resource: Resource, request: Request) -> None:
        self.server = server  # its number, from 0 on
        self.resource = resource
        self.future: asyncio.Future[Grant | None] = resource.hub.loop.create_future()
        self._acquisition = Acquisition(resource, request, self.future)
        self._acquisition.ask()

    @property
    def error(self) -> SyncError | None:
        """The error of the request, if it has failed."""
        failed = self.future.done() and not self.future.cancelled()
        error = self.future.exception() if failed else None
        assert error is None or isinstance(error, SyncError)
        return error

    @property
    def answered(self) -> bool:
        """Whether the server has granted or refused it."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    @property
    def lease(self) -> Grant | None:
        """The grant, as long as it is held."""
        lease = self.future.result() if self.answered else None
        return lease if lease is not None and lease.remaining() > 0 else None

    @property
    def connection_error(self) -> Exception | None:
        """The reason that there is no connection to the server, so that no answer is expected."""
        return self.resource.hub.connection_error_of(self.resource.keys)

    def withdraw(self) -> None:
        """Undo the request in the background."""
        undo_in(self.resource.hub.loop, partial(self._acquisition.task_cancelled, self.future))


async def in_time(answer: Awaitable[T], within: float) -> T | SyncError:
    """Return the answer of one server, or the error if there is none in ``within`` seconds."""
    try:
        async with asyncio.timeout(within):
            return await answer
    except TimeoutError:
        return Unreachable.one_server(within)
    except SyncError as error:
        return error


async def raise_fence(vote: Vote, lease: Grant, fence: int, within: float) -> bool:
    """Raise the fences of the server of ``vote``, so that its next is higher than ``fence``; return whether it did.

    It has to answer in ``within`` seconds. One round trip, unless its own is as high.
    """
    if lease.fence < fence:
        reserving = vote.resource.hub.manager.renewals.reserve(lease, fence - lease.fence)
        if await in_time(reserving, within) is not None:
            return False
    return vote.lease is lease


class Votes:
    """The votes of one attempt. At the end of its ``with`` those that are not used are withdrawn."""

    def __init__(self, quorum: int, answer_within: float) -> None:
        self.all: list[Vote] = []
        self._quorum = quorum
        self._answer_within = answer_within

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for vote in self.all:
            if not vote.used:
                vote.withdraw()

    def ask(self, server: int, resource: Resource, request: Request) -> Vote:
        """Ask one more server."""
        vote = Vote(server, resource, request)
        self.all.append(vote)
        return vote

    @property
    def granted(self) -> list[tuple[Vote, Grant]]:
        """The votes that were granted, each with its grant."""
        return [(vote, lease) for vote in self.all if (lease := vote.lease) is not None]

    @property
    def suffice(self) -> bool:
        """Whether the granted votes are a majority."""
        return len(self.granted) >= self._quorum

    async def answers(self, ends: float) -> None:
        """Wait for all answers, as long as a server may take; not for servers out of reach if the others suffice."""
        ends = min(ends, now() + self._answer_within)
        while missing := [vote for vote in self.all if not vote.future.done()]:
            left = ends - now()
            if left <= 0 or (self.suffice and all(vote.connection_error is not None for vote in missing)):
                return
            await asyncio.wait(
                [vote.future for vote in missing],
                timeout=min(left, CHECK_INTERVAL),
                return_when=asyncio.FIRST_COMPLETED,
            )
