"""The number of calls within the package that a free lock costs: a ratchet against layers that only pass on.

Calls are a cost that no machine blurs, and a measure of how far a reader has to go.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

import pytest

import redis_sync_aio
from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator

PACKAGE = str(Path(redis_sync_aio.__file__).parent)


class Calls:
    """The functions of the package that were called in a block; coroutines that go on are not counted again."""

    def __init__(self) -> None:
        self._frames: dict[FrameType, str] = {}  # kept, so that no frame is used again

    def __enter__(self) -> Calls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self._frames.setdefault(frame, f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}")

    @property
    def names(self) -> list[str]:
        """The functions, in the order of their calls."""
        return list(self._frames.values())


async def fewest(act: Callable[[], Awaitable[Calls]]) -> list[str]:
    """The calls of the cheapest of several runs: a timer or a message may come in between."""
    return min([(await act()).names for _ in range(5)], key=len)


async def acquiring(sync: Coordinator) -> Calls:
    lock = AsyncLock(sync, "free")
    await (await lock.acquire()).release()  # opens the connection
    with Calls() as calls:
        lease = await lock.acquire()
    await lease.release()
    return calls


async def acquiring_with_a_timeout(sync: Coordinator) -> Calls:
    lock = AsyncLock(sync, "free")
    await (await lock.acquire(timeout=60)).release()
    with Calls() as calls:
        lease = await lock.acquire(timeout=60)
    await lease.release()
    return calls


async def releasing(sync: Coordinator) -> Calls:
    lock = AsyncLock(sync, "free")
    await (await lock.acquire()).release()
    lease = await lock.acquire()
    with Calls() as calls:
        await lease.release()
    return calls


async def entering_and_leaving(sync: Coordinator) -> Calls:
    lock = AsyncLock(sync, "free")
    async with lock:
        pass
    with Calls() as calls:
        async with lock:
            pass
    return calls


async def a_permit(sync: Coordinator) -> Calls:
    semaphore = AsyncSemaphore(sync, "free permits", 5)
    await (await semaphore.acquire()).release()
    with Calls() as calls:
        await (await semaphore.acquire()).release()
    return calls


@pytest.mark.real
@pytest.mark.parametrize(
    ("most", "act"),
    [
        (38, acquiring),
        (41, acquiring_with_a_timeout),
        (27, releasing),
        (68, entering_and_leaving),
        (66, a_permit),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_calls_of_a_free_name(
    sync: Coordinator, most: int, act: Callable[[Coordinator], Awaitable[Calls]]
) -> None:
    """Lower a number when a change makes it possible; raise it only for what users get for it."""
    names = await fewest(lambda: act(sync))
    assert len(names) <= most, "\n".join(names)
