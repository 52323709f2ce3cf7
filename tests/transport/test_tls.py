"""Encrypted connections: all that the link does on a plain one (FAULTS C), on a transport that is not the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import anyio
import pytest
import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import AsyncSemaphore, Coordinator, LeaseLost, Unreachable, transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Transaction

from ..support.inside import hub_of, now
from ..support.primitives import Exclusive
from ..support.tls import Tls, encrypted, make_tls
from ..support.wire_sweep import (
    ANSWERS,
    PUSHES,
    Case,
    Operation,
    acquire_contended,
    acquire_free,
    acquire_pushed,
    release,
    sweep,
    wire_faults,
)
from ..support.wired import RELEASE, SOON, wired
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def url(server: EmbeddedServer, tls: Tls) -> Iterator[str]:
    """The server's, by a way that is there whichever loop runs."""
    with encrypted(server.unix_socket, tls) as port:
        yield tls.url(port)


PATIENT = {"socket_timeout": 30, "socket_connect_timeout": 30}
BOUNDS = {"response_timeout": 3, "retry_for": 60}
"""Longer than a busy machine lets an answer wait. All faults are tried at the same time."""
FAULTS = wire_faults(BOUNDS["response_timeout"]) | {"twice": Action.DUPLICATE, "LOADING": ANSWERS["LOADING"]}


@pytest.mark.parametrize(
    "operation", [acquire_contended, *(pytest.param(it, marks=pytest.mark.ci) for it in (acquire_free, release))]
)
async def test_sweep(server: EmbeddedServer, tls: Tls, operation: Operation) -> None:
    """C1-C5: every fault of the wire. `test_wire.py` has all operations without encryption."""
    cases = [Case(operation, "link", fault, FAULTS[fault]) for fault in FAULTS]
    assert await sweep(server, cases, client=tls.options | PATIENT, tls=tls.context, **BOUNDS) == len(cases)


async def test_sweep_of_the_push(server: EmbeddedServer, tls: Tls) -> None:
    """P3, C7."""
    cases = [Case(acquire_pushed, "link", fault, PUSHES[fault], push=True) for fault in PUSHES]
    options = {"client": tls.options | PATIENT, "tls": tls.context, "poll_cap": 0.3, **BOUNDS}
    assert await sweep(server, cases, **options) == len(cases)


async def test_it_is_the_link_that_carries_all(server: EmbeddedServer, tls: Tls) -> None:
    """One connection, encrypted, and pushes on it."""
    async with wired(server, client=tls.options, tls=tls.context) as w:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(used_once(w.lock()))
        assert hub_of(w.sync).pushes
        assert w.proxy.connections == 1


async def used_once(lock: Exclusive) -> None:
    async with lock:
        await asyncio.sleep(0)


async def test_more_than_a_tls_record_passes_in_one_write(server: EmbeddedServer, tls: Tls) -> None:
    """Names of 8 KB, in both directions, and 300 requests in a turn."""
    async with wired(server, client=tls.options | PATIENT, tls=tls.context, response_timeout=20, retry_for=60) as w:
        names = [f"{number:03}" * 2_500 for number in range(300)]
        leases = await asyncio.gather(*(w.sync.lock(name).acquire() for name in names))
        assert len({lease.fence for lease in leases}) >= 1
        await asyncio.gather(*(lease.release() for lease in leases))
        await w.check_free(0)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_permits_and_transactions(url: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(permits_and_transactions(url))


async def permits_and_transactions(url: str) -> None:
    async with Redis.from_url(url) as client:
        semaphore = AsyncSemaphore(client, "gpu", limit=2)
        async with semaphore, semaphore.acquire() as lease:
            assert (await semaphore.statistics()).available == 0

            async def add(tx: Transaction) -> None:
                await tx.get("n")
                tx.multi()
                await tx.incr("n")

            before = int(await client.get("n") or 0)
            await transaction(client, add, "n")
            assert int(await client.get("n") or 0) == before + 1
            assert lease.fence


async def test_an_untrusted_certificate_is_reported(server: EmbeddedServer, tls: Tls) -> None:
    """The reason is in the error; nothing was sent."""
    async with (
        FaultProxy(server.unix_socket, tls.context) as proxy,
        Redis(host=proxy.host, port=proxy.port, ssl=True, retry=Retry(NoBackoff(), 0)) as client,
        Coordinator(client, retry_for=1) as sync,
    ):
        with pytest.raises(Unreachable, match=r"(?i)certificate.verify.failed"):
            await sync.lock("a").acquire()
        assert not proxy.commands


async def test_b3_a_silent_server_is_left_in_time(server: EmbeddedServer, tls: Tls) -> None:
    """Nobody waits for its goodbye: neither the release that goes on elsewhere, nor who closes all."""
    async with wired(server, client=tls.options, tls=tls.context) as w:
        lease = await w.lock().acquire()
        w.proxy.on(RELEASE, Action.SWALLOW_REPLY)
        await lease.release()  # over another connection
        w.proxy.black_hole = True
        with anyio.fail_after(15):
            await w.sync.aclose()
            await w.client.aclose()
        w.proxy.black_hole = False


async def test_a_lease_is_lost_in_time(server: EmbeddedServer, tls: Tls) -> None:
    """P6, C4: also when what is written to goes nowhere."""
    async with wired(server, client=tls.options, tls=tls.context) as w:
        began = now()
        with anyio.fail_after(15), pytest.raises(LeaseLost):  # noqa: PT012
            async with w.lock(ttl=3) as lease:
                w.proxy.black_hole = True
                await asyncio.Event().wait()
        assert now() >= began + 2.5
        assert lease.remaining() == 0  # pyright: ignore[reportPossiblyUnboundVariable]
        w.proxy.black_hole = False
        await wait_until(lambda: w.sync.connection_error is None, SOON, timeout=15)
