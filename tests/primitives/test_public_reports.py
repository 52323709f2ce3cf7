"""Six public reports about locks of asyncio programs, and the tests that show that they do not happen here.

| The report | Its tests |
|---|---|
| A request handler returns while a background job still needs its lock: it was released, or nobody releases it | here |
| A job of a millisecond runs twice on two machines: the clock of one is late, the lock is free again | `RUN_TWICE` |
| A permit is gone for good: its holder was cancelled, or a stream was never closed | `LEAKED_SLOT` |
| A request whose HTTP client has gone waits on, and gets the lock for nobody | `GONE_CLIENT` |
| "attached to a different loop": a coordinator made for one test is used by the next, in another event loop | `LOOPS` |
| A process that was forked uses the connections, or the leases, of its parent | `FORK` |
"""

from __future__ import annotations

import ast
import asyncio
import gc
import warnings
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, NotHeld, wait_until

from ..support.body import FAST

TESTS = Path(__file__).parents[1]
RUN_TWICE = {
    "primitives/test_jobs.py": [
        "test_one_of_several_enters_and_the_mark_outlasts_the_lock",
        "test_each_slot_runs_once_over_processes",
    ],
    "primitives/test_min_hold.py": ["test_it_stays_taken_after_the_release"],
    "faults/test_clocks.py": ["test_p1_d14_each_slot_runs_once_by_clocks_that_differ"],
}
LEAKED_SLOT = {
    "conformance/test_semaphore_cancellation.py": ["test_p5_cancelled_at_every_suspension_point"],
    "contrib/test_asgi.py": [
        "test_a_stream_has_its_permit_to_its_end_also_when_the_client_goes",
        "test_a_request_that_is_cancelled_at_any_await_leaves_nothing",
    ],
}
GONE_CLIENT = {
    "contrib/test_fastapi.py": ["test_a_client_that_goes_away_leaves_the_queue_and_is_not_served"],
    "contrib/test_aiohttp.py": ["test_a_client_that_goes_away_leaves_the_queue_and_is_not_served"],
    "contrib/test_asgi.py": ["test_a_client_that_goes_while_it_waits_leaves_the_queue_and_bodies_arrive_whole"],
}
LOOPS = {
    "transport/test_loops_and_forks.py": [
        "test_p12_a9_one_loop_after_the_other",
        "test_p12_a9_coordinator_and_lease_belong_to_their_loop",
    ],
    "testing/test_plugin.py": ["test_pytest_asyncio", "test_anyio"],
}
FORK = {"transport/test_loops_and_forks.py": ["test_p12_a8_fork", "test_p12_a8_fork_while_it_connects"]}


@pytest.mark.parametrize("report", [RUN_TWICE, LEAKED_SLOT, GONE_CLIENT, LOOPS, FORK])
def test_the_tests_that_are_named_here_exist(report: dict[str, list[str]]) -> None:
    for path, names in report.items():
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = {it.name for it in ast.parse((TESTS / path).read_text()).body if isinstance(it, functions)}
        assert set(names) <= found, path


# -- forgotten detach --------------------------------------------------------------------------------------


async def test_a_handler_that_detaches_returns_and_a_job_goes_on_under_its_lease(
    sync: Coordinator, other: Coordinator
) -> None:
    """Its lease is neither released by the end of its body, nor reported as forgotten: the job has it."""
    jobs: asyncio.Queue[str] = asyncio.Queue()

    async def handler() -> int:
        async with sync.lock("order", ttl=600) as lease:
            jobs.put_nowait(await lease.detach())
            return lease.fence

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        fence = await asyncio.create_task(handler())
        gc.collect()
    assert await sync.lock("order").try_acquire() is None
    async with await other.lock("order", ttl=600).attach(await jobs.get()) as lease:
        assert lease.fence == fence
        assert await sync.lock("order").try_acquire() is None
    async with asyncio.timeout(60), sync.lock("order") as lease:
        assert lease.fence > fence


async def test_a_handler_that_forgets_to_detach_takes_the_lock_with_it(sync: Coordinator, other: Coordinator) -> None:
    """The job that it left behind is refused before it does anything: it never works without the lock."""
    returned = asyncio.Event()

    async def handler() -> asyncio.Task[None]:
        async with sync.lock("order") as lease:

            async def job() -> None:
                await returned.wait()
                lease.check()
                raise AssertionError("it worked without the lock")

            return asyncio.create_task(job())

    job = await asyncio.create_task(handler())
    async with asyncio.timeout(60), other.lock("order"):
        returned.set()
        with pytest.raises(NotHeld):
            await job


async def test_a_job_that_is_never_begun_blocks_nobody_for_longer_than_its_ttl(
    sync: Coordinator, other: Coordinator, redis: Redis
) -> None:
    """The message with the token is lost. A worker that finds it later must not do its work."""
    lease = await sync.lock("order", ttl=600).acquire()
    token = await lease.detach(ttl=0.3)

    async def gone() -> bool:
        return await redis.exists("order") == 0

    await wait_until(gone, FAST, timeout=60)
    async with other.lock("order") as following:
        assert following.fence > lease.fence
        with pytest.raises(NotHeld):
            await sync.lock("order").attach(token)
