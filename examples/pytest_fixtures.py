"""pytest-asyncio fixtures: a private server, a client, a Coordinator, and a lease that is held during a test.

Copy the fixtures into your conftest.py. pytest-asyncio runs the set-up of a fixture, the test and the tear-down as
different tasks; a lease may be acquired in one and released in another. Needs ``pip install
'redis_sync_aio[embedded]' pytest-asyncio`` (and, so that pytest-asyncio does not warn,
``asyncio_default_fixture_loop_scope = "function"`` in pytest's configuration). Run::

    pytest examples/pytest_fixtures.py

Read more in docs/guides/testing.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer

pytestmark = pytest.mark.asyncio  # not needed with asyncio_mode = "auto"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    """One server for all tests, started in about 40 ms."""
    with EmbeddedServer() as server:
        yield server


@pytest_asyncio.fixture
async def redis(redis_server: EmbeddedServer) -> AsyncIterator[Redis]:
    """A client of an empty server, one per test, like the event loop that its connections belong to."""
    async with redis_server.client(decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest_asyncio.fixture
async def sync(redis: Redis) -> AsyncIterator[Coordinator]:
    """The coordinator of the code under test. At the end it releases any locks that a failed test still holds."""
    async with Coordinator(redis) as coordinator:
        yield coordinator


@pytest_asyncio.fixture
async def lease(sync: Coordinator, request: pytest.FixtureRequest) -> AsyncIterator[Lease]:
    """The lock of a resource that only one test may use at a time, held during the test.

    Against one shared server it also excludes the tests of other pytest-xdist workers and of other CI jobs. If the
    lease is lost, the test cannot be cancelled, since another task acquired it: it fails in the tear-down.
    """
    async with sync.lock("tests:printer").acquire(timeout=60) as lease:
        yield lease


async def test_the_lease_is_held_during_the_test(sync: Coordinator, lease: Lease) -> None:
    printer = sync.lock("tests:printer")
    assert (await printer.statistics()).fence == lease.fence
    assert await printer.try_acquire() is None


async def test_the_next_test_gets_it_immediately(lease: Lease) -> None:
    assert lease.remaining() > 0


async def test_two_tasks_take_turns(sync: Coordinator) -> None:
    printer, pages = sync.lock("tests:printer"), list[str]()

    async def print_two_pages(name: str) -> None:
        async with printer:
            pages.append(f"{name} 1")
            await asyncio.sleep(0)  # without the lock the other task would print now
            pages.append(f"{name} 2")

    async with asyncio.TaskGroup() as tasks, printer:
        tasks.create_task(print_two_pages("first"))
        await queued(printer, 1)
        tasks.create_task(print_two_pages("second"))
        await queued(printer, 2)
        assert pages == []
    assert pages == ["first 1", "first 2", "second 1", "second 2"]


async def test_a_lost_lease_ends_the_work(sync: Coordinator) -> None:
    printer = sync.lock("tests:printer", ttl=0.3)

    async def print_forever() -> None:
        async with printer:
            await printer.force_release()  # stands for any cause of a loss
            await asyncio.Event().wait()  # cancelled at the next renewal, which is due after a third of the ttl

    with pytest.raises(LeaseLost, match="tests:printer"):
        await asyncio.wait_for(print_forever(), timeout=5)


async def queued(lock: AsyncLock, count: int) -> None:
    """Wait until the server reports ``count`` waiters. This is exact, where a sleep would be slow or wrong."""

    async def reached() -> bool:
        return (await lock.statistics()).waiting == count

    await wait_until(reached, timeout=5)
