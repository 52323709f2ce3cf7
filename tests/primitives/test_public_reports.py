"""Six public reports about locks of asyncio programs, and the tests that show that they do not happen here.

- Forgotten detach: a request handler returns while a job elsewhere needs its lock. It is released too early, or by
  nobody. The tests are in this module.
- Run twice: a job of a millisecond runs on two machines, since the clock of one is late, and the lock is free again.
  `test_one_of_several_enters_and_the_mark_outlasts_the_lock`, `test_each_slot_runs_once_over_processes`,
  `test_p1_d14_each_slot_runs_once_by_clocks_that_differ`.
- Leaked slot: a permit is gone for good, since its holder was cancelled, or a stream was never closed.
  `test_p5_cancelled_at_every_suspension_point`, `test_a_stream_has_its_permit_to_its_end_also_when_the_client_goes`.
- Gone client: a request whose HTTP client has gone waits on, and gets the lock for nobody.
  `test_a_client_that_goes_away_leaves_the_queue_and_is_not_served`,
  `test_a_client_that_goes_while_it_waits_leaves_the_queue_and_bodies_arrive_whole`.
- Loops of pytest: a coordinator that was made for one test is used by the next one, in another event loop.
  `test_p12_a9_one_loop_after_the_other`, `test_p12_a9_coordinator_and_lease_belong_to_their_loop`,
  `test_pytest_asyncio`, `test_anyio`.
- Fork: a process that was forked uses the connections, or the leases, of its parent.
  `test_p12_a8_fork`, `test_p12_a8_fork_while_it_connects`.
"""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, NotHeld, wait_until

from ..support.body import FAST


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
