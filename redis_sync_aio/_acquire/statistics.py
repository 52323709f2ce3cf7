"""The leases and waits of one process, as its hub knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from .._core.clock import now
from .._core.keys import Keys, PermitKeys
from .._leases.grant import Grant
from .._scripts.constants import WRITER_WEIGHT
from .acquisition import Acquisition
from .resource import Resource

Kind: TypeAlias = Literal["lock", "robust", "semaphore", "read", "write", "event", "latch", "barrier"]


@dataclass(frozen=True, slots=True)
class HeldHere:
    """A lease of this process.

    Attributes:
        name: The name of the lock. A reentrant lock and a multi-lock are shown as the locks that they are made of.
        kind: "lock", "robust", "semaphore", "read" or "write"; for a moment "event", "latch" or "barrier".
        token: The token of the lease.
        identity: The identity that the caller gave. None: it gave none.
        label: The text by which people know the holder, as of `Lease`.
        fence: The fence of the lease.
        weight: How many permits the lease has; 1 for all but semaphores.
        held_for: Seconds since the grant, when this was asked for.
        remaining: Seconds for which it is certainly held unless it is renewed. None: it has no end.
        task: The name of the task that acquired it. None: the task has ended, or an identity or another lease owns it.
    """

    name: str
    kind: Kind
    token: str
    identity: str | None
    label: str
    fence: int
    weight: int
    held_for: float
    remaining: float | None
    task: str | None


@dataclass(frozen=True, slots=True)
class WaitingHere:
    """A task of this process that waits.

    Attributes:
        name: The name of the lock, as for `HeldHere`.
        kind: The kind of the lock, as for `HeldHere`.
        waited: Seconds since it asked. None: the task shares, and waits for another task of this process.
        task: The name of the task. None: it is not known.
    """

    name: str
    kind: Kind
    waited: float | None
    task: str | None


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """The leases and waits of a coordinator, by name: the view of this process, without asking the server.

    Attributes:
        held: The leases, sorted by name; those of one name by age, the oldest first.
        waiting: The tasks that wait, sorted by name.
    """

    held: tuple[HeldHere, ...] = ()
    waiting: tuple[WaitingHere, ...] = ()


class CountedHub(Protocol):
    """The hub, as its statistics know it."""

    loop: asyncio.AbstractEventLoop
    resources: dict[bytes, Resource]


def statistics_of(hub: CountedHub) -> CoordinatorStatistics:
    """Return what a hub holds and waits for."""
    waiters: dict[Any, str] = {
        waiter: task.get_name()
        for task in asyncio.all_tasks(hub.loop)
        if (waiter := getattr(task, "_fut_waiter", None)) is not None
    }
    held, waiting = list[HeldHere](), list[WaitingHere]()
    for resource in sorted(hub.resources.values(), key=lambda it: it.name):
        held += [_held(resource, grant) for grant in resource.held()]
        waiting += _waiting(resource, waiters)
    return CoordinatorStatistics(tuple(held), tuple(waiting))


def _held(resource: Resource, grant: Grant) -> HeldHere:
    owners = [grant, *(grant.group.shares if grant.group is not None else ())]
    tasks = [task for it in owners if it.acquirer is not None and (task := it.acquirer()) is not None]
    kind = kind_of(resource.keys, grant.weight)
    remaining = grant.remaining()
    return HeldHere(
        resource.name,
        kind,
        grant.token,
        grant.identity,
        grant.label,
        grant.fence,
        grant.weight if kind == "semaphore" else 1,
        now() - grant.since,
        None if remaining == float("inf") else remaining,
        tasks[0].get_name() if tasks else None,
    )


def _waiting(resource: Resource, waiters: dict[Any, str]) -> Iterator[WaitingHere]:
    begun: dict[Any, Acquisition] = {it.taker: it for it in resource.acquisitions.values()}
    for future in resource.waiters():
        acquisition = begun.get(future)
        waited = None if acquisition is None or not acquisition.begun else now() - acquisition.begun
        weight = 0 if acquisition is None else acquisition.weight
        yield WaitingHere(resource.name, kind_of(resource.keys, weight), waited, waiters.get(future))


def kind_of(keys: Keys, weight: int) -> Kind:
    """Return the kind of a name, or of the side of a read/write lock that has so much weight."""
    if not isinstance(keys, PermitKeys):
        return "robust" if keys.family == "robust" else "lock"
    if keys.kind != "rw":
        return "semaphore" if keys.kind == "sem" else keys.kind
    return "write" if weight == WRITER_WEIGHT else "read"
