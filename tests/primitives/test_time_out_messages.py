"""What the errors of those say whose time is up: why, and what to do."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as OutOfReach

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    LeaderElection,
    Unreachable,
    WouldDeadlock,
    idempotent,
)

NAME = "job"


@pytest.mark.parametrize("share", [False, True])
async def test_a_server_out_of_reach(share: bool) -> None:
    """What redis-py said, and what to look at."""
    async with Redis(port=1) as client, Coordinator(client, retry_for=0.5) as sync:
        with pytest.raises(Unreachable, match="check the server and the network") as caught:
            await AsyncLock(sync, NAME, share=share).acquire(timeout=0.2)
        assert f"{NAME!r} within 0.2 seconds: ConnectionError: Error" in str(caught.value)
        cause, trouble = caught.value.__cause__, sync.connection_error  # by now perhaps that of one attempt more
        assert type(cause) is type(trouble) is OutOfReach
        assert str(cause) == str(trouble)


HERE = f"{socket.gethostname()[:32]}:{os.getpid()}"
ITSELF = "If the holder is the very task that asks, it waits for itself"


async def message(asked: Any, timeout: float = 0.2, **options: Any) -> str:
    with pytest.raises(AcquireTimeout) as caught:
        await asked.acquire(timeout=timeout, **options)
    return str(caught.value)


@pytest.mark.parametrize("share", [False, True])
async def test_permits_that_this_process_holds(sync: Coordinator, other: Coordinator, share: bool) -> None:
    ours, theirs = (AsyncSemaphore(one, NAME, limit=3, share=share) for one in (sync, other))
    async with ours.acquire(weight=2), ours:
        assert f"this process holds 3 of them. {ITSELF}" in await message(ours)
        assert f"held by {HERE}; wait longer" in await message(theirs)


@pytest.mark.parametrize("names", [["a", "b"], ["{t}:a", "{t}:b"]])
async def test_several_without_an_answer(sync: Coordinator, redis: Redis, names: list[str]) -> None:
    """Nobody is blamed for holding what may be free."""
    lock = AsyncMultiLock(sync, names)
    async with lock:
        pass
    await redis.execute_command("CLIENT", "PAUSE", 300)  # type: ignore[no-untyped-call]
    with pytest.raises(AcquireTimeout, match=r"Redis has not answered yet about .*; allow more time") as caught:
        await lock.acquire(timeout=0.2)
    assert not caught.value.answered
    async with AsyncLock(sync, "c"):
        lease = await lock.acquire()
        with pytest.raises(AcquireTimeout, match="this process holds") as caught:
            await lock.acquire(timeout=0.2)
        assert caught.value.answered
        await lease.release()


SIDES: dict[str, Callable[[AsyncReadWriteLock], Any]] = {
    "read": AsyncReadWriteLock.read,
    "write": AsyncReadWriteLock.write,
}


@pytest.mark.parametrize(
    ("held", "asked", "use"),
    [
        ("read", "write", "release that lease before you acquire the write side"),
        ("write", "read", "go on with that lease"),
        ("write", "write", "go on with that lease"),
    ],
)
async def test_a_side_that_this_process_holds(
    sync: Coordinator, other: Coordinator, held: str, asked: str, use: str
) -> None:
    ours, theirs = AsyncReadWriteLock(sync, NAME), AsyncReadWriteLock(other, NAME)
    lease = await SIDES[held](ours).acquire()  # without a body: it may be for another task to release
    assert f"this process holds it. {ITSELF}: {use}" in await message(SIDES[asked](ours))
    assert f"held by {HERE}; wait longer" in await message(SIDES[asked](theirs))
    await lease.release()


@pytest.mark.parametrize(
    ("has", "asks", "use"),
    [("write", "read", r"for writing: .*downgrade\(\) it"), ("read", "write", "reading: release that lease")],
)
async def test_an_identity_that_has_the_other_side(sync: Coordinator, has: str, asks: str, use: str) -> None:
    lock = AsyncReadWriteLock(sync, NAME)
    lease = await SIDES[has](lock).acquire(identity="me")
    with pytest.raises(WouldDeadlock, match=use):
        await SIDES[asks](lock).acquire(identity="me")
    await lease.release()


async def test_weights_that_are_not_free_together(sync: Coordinator) -> None:
    semaphore = AsyncSemaphore(sync, NAME, limit=4)
    async with semaphore:
        assert "did not have 4 of its permits free, and this call does not wait" in await message(
            semaphore, 0, weight=4
        )


async def test_advice_for_a_call_that_does_not_wait_fits_every_primitive(sync: Coordinator) -> None:
    """Elections and idempotent functions have no `try_acquire`."""
    advice = "is taken, and this call does not wait: give it time to wait, or try again later"

    async def run() -> None: ...

    async with AsyncLock(sync, NAME):
        with pytest.raises(AcquireTimeout, match=advice):
            await asyncio.create_task(LeaderElection(sync, NAME).lead(timeout=0).__aenter__())
        with pytest.raises(AcquireTimeout, match=advice):
            await asyncio.create_task(idempotent(sync, NAME, timeout=0)(run)())


async def test_a_reentrant_lock_that_another_task_of_this_process_holds(sync: Coordinator, other: Coordinator) -> None:
    ours, theirs = (AsyncReentrantLock(one, NAME) for one in (sync, other))
    async with ours:
        told: str = await asyncio.create_task(message(ours))
        assert "another task, or owner, of this process holds it" in told
        assert "acquire(identity=...)" in told
        assert "AsyncReentrantLock" not in told
        assert f"held by {HERE}; wait longer" in await asyncio.create_task(message(theirs))
        with pytest.raises(TypeError, match="an identity for 'job' must be hashable"):
            await ours.acquire(identity=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, 0.2])
async def test_one_of_several_that_this_process_holds(sync: Coordinator, other: Coordinator, timeout: float) -> None:
    lease = await AsyncLock(sync, "b").acquire()  # without a body: it may be for another task to release
    assert f"this process holds 'b'. {ITSELF}" in await message(AsyncMultiLock(sync, ["a", "b"]), timeout)
    theirs = f"'b' is held by {HERE};" if timeout else "others hold 'b' or wait for it"
    assert theirs in await message(AsyncMultiLock(other, ["a", "b"]), timeout)
    await lease.release()


async def test_what_is_left_of_a_time_out_is_rounded(sync: Coordinator, other: Coordinator) -> None:
    await AsyncLock(other, "b").acquire()
    with pytest.raises(AcquireTimeout) as caught:
        await AsyncMultiLock(sync, ["a", "b"]).acquire(timeout=0.2)
    assert re.search(r"within 0\.[01]\d{0,2} seconds", str(caught.value.__cause__))
