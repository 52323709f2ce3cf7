"""Public objects show what users may use, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncBarrier,
    AsyncCountDownLatch,
    AsyncEvent,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    LeaderElection,
    Lease,
    idempotent,
    once,
    once_per,
    transaction,
    watch_retry,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.jobs import forget
from redis_sync_aio.types import CoordinatorOptions, Transaction

from ..support.inside import HubOptions

LEASE = {
    *("name", "token", "fence", "identity", "label", "weight"),
    *("lost", "wait_lost", "remaining", "check", "extend", "release"),
}
GUARDING = LEASE | {"transaction"}
RECORD = {"abandoned", "progress", "record", "compensate", "clear_record"}


def public(face: object) -> set[str]:
    """Return the names of a class or an object that an editor offers."""
    return {name for name in dir(face) if not name.startswith("_")}


def test_a_coordinator_shows_what_users_need() -> None:
    assert public(Coordinator) == {
        *("from_url", "client", "label", "aclose", "why_closed"),
        *("connection_error", "connections", "statistics", "inspect", "ping"),
        *("lock", "semaphore", "read_write_lock", "reentrant_lock", "multi_lock", "event", "latch", "barrier"),
        *("robust_lock", "election", "fence_gate", "transaction", "watch_retry", "once", "once_per", "idempotent"),
        *("forget", "until_signal"),
    }


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("lock", AsyncLock),
        ("semaphore", AsyncSemaphore),
        ("read_write_lock", AsyncReadWriteLock),
        ("reentrant_lock", AsyncReentrantLock),
        ("multi_lock", AsyncMultiLock),
        ("event", AsyncEvent),
        ("latch", AsyncCountDownLatch),
        ("barrier", AsyncBarrier),
        ("robust_lock", AsyncRobustLock),
        ("election", LeaderElection),
        ("fence_gate", FenceGate),
        ("transaction", transaction),
        ("watch_retry", watch_retry),
        ("once", once),
        ("once_per", once_per),
        ("idempotent", idempotent),
        ("forget", forget),
    ],
)
def test_a_coordinator_makes_each_primitive_with_all_its_options(method: str, kind: Callable[..., object]) -> None:
    """An option that is added to a class is one of the coordinator's method, too, with the same default and type."""
    own = inspect.signature(getattr(Coordinator, method)).parameters
    of_class = inspect.signature(kind).parameters
    assert dict(own) == {"self": own["self"], **{name: of_class[name] for name in of_class if name != "client"}}


async def test_what_a_coordinator_makes_goes_by_its_prefix_and_connection(redis: Redis) -> None:
    """Each primitive of one server can be made by the coordinator; it needs no client of its own."""
    async with Coordinator(redis, prefix="app:") as sync:
        async with sync.robust_lock("work"), sync.election("leader").lead():
            assert {it.name for it in sync.statistics()} == {"work", "leader"}
        await sync.fence_gate("gate").accept(7)

        async def add(tx: Transaction) -> int:
            before = await tx.get("counter")
            tx.multi()
            tx.set("counter", int(before or 0) + 1)
            return 1

        assert (await sync.transaction(add, "counter")).value == 1
        async with sync.once("nightly", slot="today") as lease:
            assert lease is not None
        assert sync.connections == 1
        assert all("app:" in key for key in map(str, await redis.keys("*")) if "counter" not in key)


def test_implicit_hubs_have_the_defaults_of_a_coordinator() -> None:
    assert inspect.signature(HubOptions).parameters == inspect.signature(Coordinator).parameters


def test_a_coordinator_made_from_an_address_takes_the_same_options() -> None:
    of_class = inspect.signature(Coordinator).parameters
    keys = inspect.get_annotations(CoordinatorOptions)
    assert {name: key.__forward_arg__ for name, key in keys.items()} == {
        name: it.annotation for name, it in of_class.items() if name != "client"
    }


def undocumented(face: object) -> set[str]:
    """Return the public names that are methods or properties without a docstring."""
    kind = type(face)
    return {name for name in public(face) if hasattr(kind, name) and not getattr(kind, name).__doc__}


@pytest.mark.parametrize("share", [False, True])
async def test_a_lease_shows_what_its_holder_uses(sync: Coordinator, share: bool) -> None:
    """So does what a task has of a shared lease, and the lease of a reentrant lock."""
    lock = AsyncLock(sync, "faces", share=share)
    async with lock as lease:
        assert public(lease) == GUARDING | {"detach"}
        assert not undocumented(lease)
    async with AsyncReentrantLock(sync, "faces") as inner:
        assert public(inner) == GUARDING


async def test_a_lease_of_a_robust_lock_shows_its_record_too(sync: Coordinator) -> None:
    async with AsyncRobustLock(sync, "faces") as lease:
        assert public(lease) == GUARDING | RECORD
        assert not undocumented(lease)


async def test_a_lease_of_several_locks_shows_their_fences_too(sync: Coordinator) -> None:
    async with AsyncMultiLock(sync, ["one", "two"]) as lease:
        assert public(lease) == GUARDING | {"fences", "names"}
        assert not undocumented(lease)


async def test_a_lease_of_a_redlock_shows_where_it_is_held_too() -> None:
    async with EmbeddedServer() as one, EmbeddedServer() as two, EmbeddedServer() as three:
        clients = [server.client() for server in (one, two, three)]
        async with AsyncRedlock(clients, "faces") as lease:
            assert public(lease) == LEASE | {"held_on"}
            assert not undocumented(lease)
        for client in clients:
            await client.aclose()


def test_what_processes_wait_for_together_shows_little_more_than_asyncio_does(sync: Coordinator) -> None:
    assert public(AsyncEvent(sync, "faces")) == {"clear", "is_set", "name", "set", "statistics", "wait"}
    barrier = {"abort", "broken", "n_waiting", "name", "parties", "reset", "statistics", "wait"}
    assert public(AsyncBarrier(sync, "faces", 2)) == barrier
    assert public(AsyncCountDownLatch(sync, "faces", 2)) == {"count", "count_down", "name", "statistics", "wait"}


async def test_an_acquisition_shows_what_a_coroutine_has(sync: Coordinator) -> None:
    """It is awaited or entered; all else is its inside, before and while it holds."""
    acquiring = AsyncLock(sync, "faces").acquire()
    assert public(acquiring) == {"close", "send", "throw"}
    async with acquiring as lease:
        assert public(acquiring) == {"close", "send", "throw"}
        assert isinstance(lease, Lease)
