"""Requests for several locks that leave in one write, none of which waits.

Each lock has an acquisition of its own, so a request that is late, cancelled, repeated or undone is handled as that of
a single lock. Locks of one hash slot are requested by one script, all or none, and its answer is dealt out to the
acquisitions.

This is only done over a link, where a later command is executed later. The undo of a cancelled request is sent for each
lock, and over the pool of a client it could overtake a script about several locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from .._acquire.acquisition import Acquisition
from .._acquire.request import Request
from .._acquire.resource import Resource
from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.keys import joined_keys
from .._engine.commands import Delivery
from .._engine.replies import left_free
from .._leases.grant import Grant
from .._transport.call import Call


async def try_acquire_all(names: Sequence[Resource], request: Request) -> tuple[list[Grant | None], list[bool]]:
    """Ask for all ``names`` in one round trip. Return a grant or None for each, and whether each is free all the same.

    ``request`` must not wait, and must have no token and no identity. If one request fails, and on cancellation, all
    are undone.
    """
    hub = names[0].hub
    futures: list[asyncio.Future[Grant | None]] = [hub.loop.create_future() for _ in names]
    acquisitions = [Acquisition(name, request, future) for name, future in zip(names, futures, strict=True)]
    free = [False] * len(names)
    keys = joined_keys([name.keys for name in names]) if len(names) > 1 and hub.pushes else None
    if keys is None:
        for acquisition in acquisitions:
            acquisition.ask()
    else:
        sent = now()
        numbers = [acquisition.number for acquisition in acquisitions]
        done = _deal_out(acquisitions, free)
        prefix = request.label + names[0].endpoint.token_prefix
        delivery = Delivery(sent, sent + hub.retry_for, done)
        call = hub.engine.acquire_all(keys, prefix, numbers, delivery, ttl_ms=request.ttl_ms)
        for acquisition in acquisitions:
            acquisition.sent, acquisition.call = sent, call
    try:
        leases = [await future for future in futures]
        for name, lease in zip(names, leases, strict=True):
            if lease is not None and (task := asyncio.current_task()) is not None:
                name.leases.acquired(lease, task)
        return leases, free
    except BaseException:
        for acquisition, future in zip(acquisitions, futures, strict=True):
            undo_in(hub.loop, partial(acquisition.task_cancelled, future))
        raise


def _deal_out(acquisitions: Sequence[Acquisition], free: list[bool]) -> Callable[[Call], None]:
    """Return a function that gives each acquisition its part of the answer, and notes which locks are ``free``."""

    def answered(call: Call) -> None:
        replies = [None] * len(acquisitions) if call.error is not None else call.reply
        free[:] = map(left_free, replies)
        for acquisition, reply in zip(acquisitions, replies, strict=True):
            call.settle_part(reply, acquisition.answered)

    return answered
