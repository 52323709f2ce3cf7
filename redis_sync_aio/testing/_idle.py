"""The remains of the locks of a client: leases, waiting tasks, coordinators, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

from redis.asyncio import Redis

from .._client.settings import Client
from .._core.arguments import Seconds, seconds
from .._core.backoff import wait_until
from .._leases.hub import Hub, living
from .._leases.implicit import CoordinatorLike, client_of
from .._leases.settings import HELD
from .._leases.statistics import statistics_of
from ..inspection import inspect
from .servers import SOON


async def assert_idle(client: Client | CoordinatorLike, *, within: Seconds = 5.0) -> None:
    """Check that nothing is left of the locks of ``client``: no lease, no ticket, no coordinator, no connection.

    In this process: leases, tasks that wait, coordinators that were not closed (other than ``client`` itself),
    connections of the client's pool that were not given back. On the server: names that any process holds or waits for.

    Args:
        client: An asyncio client, or a `Coordinator`, which may stay open.
        within: Seconds (or timedelta) for what is about to end by itself, such as a release in flight.

    Raises:
        AssertionError: Something is left; the message lists all of it.
        Unreachable, CommandRefused: The server could not be asked.
    """
    source, left, limit = client_of(client), list[str](), seconds(within, "within")
    own = None if client is source else cast("CoordinatorLike", client)._binding.started

    async def nothing() -> bool:
        for hub in hubs_of(source):
            hub.give_back_resting()  # what no task holds, and the server still shows
        found = left_in_hubs(source, own) + left_in_pool(source)
        for name in await inspect(source):
            holders = [f"{it.token!r}" for it in name.holders]
            found.append(f"at the server: {name.kind} {name.name!r}, held by {holders}, {name.waiting} waiting")
        left[:] = found  # a look that is cut short says nothing
        return not left

    if await nothing():  # one look in any case, however long the server takes
        return
    try:
        await wait_until(nothing, SOON, timeout=limit)
    except TimeoutError:
        raise AssertionError(f"not idle: {'; '.join(left)}") from None


def hubs_of(client: Client) -> list[Hub]:
    """Return the hubs of this process that use ``client`` and can still be used, or are being closed."""
    hubs = [closing.hub for closing in list(living.values())]
    return [hub for hub in hubs if hub.client is client and not hub.forked and not hub.loop.is_closed() and open_(hub)]


def open_(hub: Hub) -> bool:
    """Return whether a hub was not closed, or is just being closed."""
    task = hub.closing.task
    return hub.why_closed is None or (task is not None and not task.done())


def left_in_hubs(client: Client, *own: Hub | None, where: Callable[[Hub], bool] = lambda _: True) -> list[str]:
    """Return the leftovers of locks in this process, a sentence each; coordinators that are ``own`` may be open.

    ``where``: which hubs to look at.
    """
    left: list[str] = []
    for hub in hubs_of(client):
        if where(hub):
            left += _left_in(hub)
            if hub not in own and hub.closing.idle is None:  # else it is implicit, and closes itself
                left.append(f"{hub!r} was not closed")
    return left


def left_in_pool(client: Client) -> list[str]:
    """Return a sentence about connections of the client's pool that were not given back, if there are any."""
    if not isinstance(client, Redis):
        return []
    pool: Any = client.connection_pool
    # A client of a single connection keeps that.
    used = sum(one is not client.connection for one in pool._in_use_connections)
    return [f"{used} connections of the client's pool were not given back (a pubsub or pipeline?)"] if used else []


def _left_in(hub: Hub) -> Iterator[str]:
    held = [grant for resource in hub.resources.values() for grant in resource.held() if grant.state is HELD]
    known = {grant.token: grant.fence for grant in held}
    for name in statistics_of(hub):
        for one in name.holders:
            if known.get(one.token) == one.fence:
                by = f"identity {one.identity!r}" if one.identity else "a task that has ended"
                yield f"{one.access or name.kind} {name.name!r} is held by {f'task {one.task!r}' if one.task else by}"
        for waiter in name.waiters:
            by = f"task {waiter.task!r}" if waiter.task else "a task"
            yield f"{waiter.access or name.kind} {name.name!r} is waited for by {by}"
    yield from _cancelled_waits(hub)


def _cancelled_waits(hub: Hub) -> Iterator[str]:
    """Yield a sentence for each wait whose task was cancelled and has not run since.

    The end of a loop cancels one task after the other. So a look meanwhile finds some of them cancelled.
    """
    awaited = {getattr(task, "_fut_waiter", None): task.get_name() for task in asyncio.all_tasks(hub.loop)}
    for resource in hub.resources.values():
        waits: list[Any] = [it.waiter for it in resource.acquisitions.values()]
        for cohort in resource.cohorts.values():
            waits += [future for future, *_ in cohort.line]
        for future in waits:
            if isinstance(future, asyncio.Future) and future.cancelled() and future in awaited:
                yield f"{resource.keys.kind.name} {resource.name!r} is waited for by task {awaited[future]!r}"


async def close_hubs(client: Client, loop: asyncio.AbstractEventLoop) -> None:
    """Close all hubs of ``client`` in the running loop."""
    for hub in hubs_of(client):
        if hub.loop is loop:
            await hub.closing.close(0.0)
