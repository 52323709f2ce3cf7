"""The leases and waits of one process, as its hub knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .._client.settings import address_of
from .._core.clock import now
from .._core.display import text
from .._core.keys import READ_WRITE, Maker, label_of
from .._inspection.reading import access, holder
from .._inspection.views import HolderView, NameView, WaiterView
from .._scripts.constants import WRITER_WEIGHT
from .grant import Grant
from .hub import Hub
from .resource import Resource


def statistics_of(hub: Hub) -> tuple[NameView, ...]:
    """Return the names that a hub holds and waits for."""
    tasks: dict[Any, str] = {
        waiter: task.get_name()
        for task in asyncio.all_tasks(hub.loop)
        if (waiter := getattr(task, "_fut_waiter", None)) is not None
    }
    found = [_view(hub, resource, tasks) for resource in hub.resources.values()]
    return tuple(sorted((it for it in found if not it.idle), key=lambda it: (it.name, it.kind)))


def _view(hub: Hub, resource: Resource, tasks: dict[Any, str]) -> NameView:
    permits = WRITER_WEIGHT if resource.keys.kind is READ_WRITE else 0
    maker = Maker.of(b"%b0" % resource.endpoint.token_prefix)
    assert maker is not None
    holders = tuple(_holder(grant, maker, permits) for grant in resource.held())
    waiters = tuple(_waiters(resource, maker, permits, tasks))
    return NameView(
        name=resource.name,
        kind=resource.keys.kind.name,
        server=address_of(hub.client),
        holders=holders,
        waiters=waiters,
        held=sum(it.weight for it in holders),
        waiting=len(waiters),
        limit=None,
        available=None,
        fence=max((it.fence for it in holders if it.fence is not None), default=None),
    )


def _holder(grant: Grant, maker: Maker, permits: int) -> HolderView:
    owners = [grant, *(grant.group.shares if grant.group is not None else ())]
    tasks = [task for it in owners if it.acquirer is not None and (task := it.acquirer()) is not None]
    left = grant.remaining()
    view = holder(
        grant.wire_token,
        0,
        grant.fence,
        None if left == float("inf") else left,
        listening={},
        weight=grant.weight or 1,
        permits=permits,
    )
    name = tasks[0].get_name() if tasks else None
    return replace(view, host=maker.host, pid=maker.pid, held_for=now() - grant.since, task=name)


def _waiters(resource: Resource, maker: Maker, permits: int, tasks: dict[Any, str]) -> Iterator[WaiterView]:
    asked: dict[Any, tuple[bytes, bytes, int]] = {
        it.waiter: (it.token, it.token, it.weight) for it in resource.acquisitions.values()
    }
    for cohort in resource.cohorts.values():
        for future, request, _ in cohort.line:
            asked[future] = b"", b"%b%b0" % (request.label, resource.endpoint.token_prefix), request.weight
    for future, begun in resource.waiters():
        token, labelled, weight = asked[future]
        yield WaiterView(
            token=text(token),
            identity=text(token) if token and Maker.of(token) is None else None,
            label=label_of(labelled),
            host=maker.host,
            pid=maker.pid,
            waited=now() - begun,
            weight=1 if permits else weight or 1,
            access=access(weight, permits),
            polls=maker.polls,
            task=tasks.get(future),
        )
