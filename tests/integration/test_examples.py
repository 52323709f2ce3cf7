"""The examples do what they say: services under concurrent requests, workers and fixtures as processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
NO_PATIENCE = 0.05  # seconds that a service waits for its turn where the test wants to see it give up


def load(name: str) -> ModuleType:
    """Import an example by its path: they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fastapi_service = load("fastapi_service")
aiohttp_service = load("aiohttp_service")
workers = load("workers")
rate_gate = load("rate_gate")
config_readers = load("config_readers")
transfer = load("transfer")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def redis(server: EmbeddedServer) -> AsyncIterator[Redis]:
    async with server.client(decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def rival(redis: Redis) -> AsyncIterator[Coordinator]:
    """Another process that wants the same locks, as far as Redis can tell."""
    async with Coordinator(redis) as coordinator:
        yield coordinator


async def waiters(lock: AsyncLock, count: int) -> None:
    async def reached() -> bool:
        return (await lock.statistics()).waiters == count

    await wait_until(reached, timeout=10)


# -- FastAPI -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose lifespan runs."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def test_fastapi_concurrent_requests_to_two_instances_lose_no_item(server: EmbeddedServer, redis: Redis) -> None:
    async with (
        started(fastapi_service.create_app(server.url, patience=30)) as one,
        started(fastapi_service.create_app(server.url, patience=30)) as two,
    ):
        answers = await asyncio.gather(
            *(client.post("/orders/1/items?price=3") for _ in range(40) for client in (one, two))
        )
        order = (await two.get("/orders/1")).json()
    assert [answer.status_code for answer in answers] == [200] * 80
    assert (order["items"], order["total"]) == (80, 240)
    saved = sorted((answer.json() for answer in answers), key=lambda order: order["fence"])
    assert [order["items"] for order in saved] == list(range(1, 81)), "the fences follow the order of the writes"
    assert len({order["fence"] for order in saved}) == 80


async def test_fastapi_without_the_lock_items_would_be_lost(server: EmbeddedServer, redis: Redis) -> None:
    app = fastapi_service.create_app(server.url)

    class NoLease:
        fence = 0

    app.dependency_overrides[fastapi_service.order_lease] = NoLease
    async with started(app) as client:
        await asyncio.gather(*(client.post("/orders/1/items?price=3") for _ in range(40)))
        assert (await client.get("/orders/1")).json()["items"] < 40


async def test_fastapi_busy_order_is_423_with_retry_after(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = AsyncLock(rival, "lock:order:1", ttl=7, auto_renew=False)
    async with started(fastapi_service.create_app(server.url, patience=NO_PATIENCE)) as client:
        async with lock:
            answer = await client.post("/orders/1/items?price=3")
            assert (await lock.statistics()).waiters == 0, "who gave up has left the queue"
            assert (await client.post("/orders/2/items?price=3")).status_code == 200, "other orders are free"
        assert answer.status_code == 423
        assert answer.json() == {"detail": "this order is being changed"}
        assert answer.headers["Retry-After"] in ("6", "7")  # what remained of the lease, rounded up
        assert (await client.get("/orders/1")).json()["items"] == 0
        assert (await client.post("/orders/1/items?price=3")).status_code == 200


async def test_fastapi_waits_its_turn(server: EmbeddedServer, redis: Redis, rival: Coordinator) -> None:
    lock = rival.lock("lock:order:1")
    async with started(fastapi_service.create_app(server.url, patience=30)) as client:
        async with lock:
            request = asyncio.create_task(client.post("/orders/1/items?price=3"))
            await waiters(lock, 1)
            assert not request.done()
        assert (await request).status_code == 200


async def test_fastapi_releases_before_the_response_is_sent(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    app = fastapi_service.create_app(server.url)
    held: list[bool] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def look_and_send(message: Any) -> None:
            held.append(await rival.lock("lock:order:1").locked())
            await send(message)

        await app(scope, receive, look_and_send)

    transport = httpx.ASGITransport(watched)
    async with started(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert held == [False, False]  # the start of the response, its body


async def test_fastapi_lost_lease_ends_the_endpoint_with_503(
    server: EmbeddedServer, redis: Redis, rival: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, working = rival.lock("lock:order:1"), asyncio.Event()

    async def slow_load(*_: object) -> None:
        working.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fastapi_service.Orders, "load", slow_load)
    async with started(fastapi_service.create_app(server.url, patience=30)) as client:
        async with lock:
            request = asyncio.create_task(client.post("/orders/1/items?price=3"))
            await waiters(lock, 1)
        await asyncio.wait_for(working.wait(), 10)
        await lock.force_release()
        answer = await asyncio.wait_for(request, 10)  # noticed at the first renewal: a third of the claim
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert "was lost" in answer.json()["detail"]


async def test_fastapi_fence_keeps_a_late_write_out(server: EmbeddedServer, redis: Redis) -> None:
    await redis.hset("order:1", mapping={"fence": 9 * 10**15, "items": 5, "total": 50})
    async with started(fastapi_service.create_app(server.url)) as client:
        answer = await client.post("/orders/1/items?price=3")
    assert answer.status_code == 503
    assert await redis.hgetall("order:1") == {"fence": "9000000000000000", "items": "5", "total": "50"}


async def test_fastapi_unreachable_redis_is_503_until_it_is_back() -> None:
    async with (
        EmbeddedServer() as server,
        started(fastapi_service.create_app(server.url, patience=0.3)) as client,
    ):
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
        server.kill()
        answer = await client.post("/orders/1/items?price=3")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        server.start()

        async def back() -> bool:
            return (await client.post("/orders/1/items?price=3")).status_code == 200

        await wait_until(back, timeout=20)


async def test_fastapi_takes_redis_from_the_environment_else_embeds_it(
    server: EmbeddedServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    async with started(fastapi_service.create_app()) as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert not await redis.exists("order:1")
    monkeypatch.setenv("REDIS_URL", server.url)
    async with started(fastapi_service.create_app()) as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert await redis.exists("order:1")


# -- aiohttp -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A client of an app that listens."""
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_aiohttp_concurrent_requests_to_two_instances_lose_no_cent(server: EmbeddedServer, redis: Redis) -> None:
    async with (
        served(aiohttp_service.create_app(server.url, patience=30)) as one,
        served(aiohttp_service.create_app(server.url, patience=30)) as two,
    ):

        async def deposit(client: TestClient[web.Request, web.Application]) -> dict[str, int]:
            async with client.post("/accounts/ann/deposits?cents=7") as answer:
                assert answer.status == 200
                account: dict[str, int] = await answer.json()
                return account

        accounts = await asyncio.gather(*(deposit(client) for _ in range(40) for client in (one, two)))
        async with two.get("/accounts/ann") as answer:
            assert (await answer.json())["cents"] == 7 * 80
    in_order = sorted(accounts, key=lambda account: account["fence"])
    assert [account["cents"] for account in in_order] == [7 * n for n in range(1, 81)]


async def test_aiohttp_busy_account_is_423_with_retry_after(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = AsyncLock(rival, "lock:account:ann", ttl=7, auto_renew=False)
    async with served(aiohttp_service.create_app(server.url, patience=NO_PATIENCE)) as client:
        async with lock, client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 423
            assert answer.headers["Retry-After"] in ("6", "7")
            assert await answer.json() == {"detail": "this account is being changed"}
            assert (await lock.statistics()).waiters == 0
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 200


async def test_aiohttp_client_that_goes_away_leaves_the_queue(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = rival.lock("lock:account:ann")
    async with served(aiohttp_service.create_app(server.url, patience=30)) as client:
        async with lock:
            gone = asyncio.create_task(client.post("/accounts/ann/deposits?cents=7").__aenter__())
            await waiters(lock, 1)
            gone.cancel()
            await waiters(lock, 0)
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert (await answer.json())["cents"] == 7


async def test_aiohttp_fence_keeps_a_late_write_out(server: EmbeddedServer, redis: Redis) -> None:
    await redis.hset("account:ann", mapping={"fence": 9 * 10**15, "cents": 5})
    async with (
        served(aiohttp_service.create_app(server.url)) as client,
        client.post("/accounts/ann/deposits?cents=7") as answer,
    ):
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
    assert await redis.hgetall("account:ann") == {"fence": "9000000000000000", "cents": "5"}


async def test_aiohttp_other_errors_pass_and_release(server: EmbeddedServer, redis: Redis, rival: Coordinator) -> None:
    async with (
        served(aiohttp_service.create_app(server.url)) as client,
        client.post("/accounts/ann/deposits?cents=many") as answer,
    ):
        assert answer.status == 400
        assert not await rival.lock("lock:account:ann").locked()


async def test_aiohttp_unreachable_redis_is_503() -> None:
    async with (
        EmbeddedServer() as server,
        served(aiohttp_service.create_app(server.url, patience=0.3)) as client,
    ):
        server.kill()
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"


# -- as processes ------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith("PYTEST")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


async def run(*arguments: str, **more: str) -> tuple[int | None, str]:
    """Run Python, and return exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=environment(**more),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.parametrize(
    ("script", "url", "ends"),
    [
        ("fastapi_service.py", "/orders/1/items?price=3", -signal.SIGTERM),  # uvicorn passes the signal on, at the end
        ("aiohttp_service.py", "/accounts/ann/deposits?cents=7", 0),
    ],
)
async def test_service_runs_and_ends_cleanly(script: str, url: str, ends: int) -> None:
    if script == "fastapi_service.py":
        pytest.importorskip("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", f"examples/{script}", cwd=ROOT, env=environment(PORT=str(port)),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def answers() -> bool:
                try:
                    return (await client.post(url)).status_code == 200
                except httpx.ConnectError:
                    return process.returncode is not None

            await wait_until(answers, timeout=20)
    finally:
        if process.returncode is None:
            process.terminate()
        output, _ = await process.communicate()
    assert process.returncode == ends, output.decode()
    assert "Traceback" not in output.decode()


async def test_workers_keep_every_rule_though_one_is_killed() -> None:
    code, output = await run("-W", "error", "examples/workers.py")
    assert code == 0, output
    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == ["ann", "bob", "cy", "cron", "process", "no"]
    for line in lines[:3]:
        assert [job.split(":")[0] for job in line.split()[1:]] == [str(job) for job in range(workers.JOBS)]
    assert len(lines[3].split()[1:]) >= workers.SLOTS
    assert lines[4].endswith("was killed in the middle of job 5")
    assert lines[5] == "no rule was broken"
    assert "Traceback" not in output


def kept_rules() -> list[list[str]]:
    """A log of three customers whose jobs were done by one process, and of two slots."""
    jobs = [
        [event, customer, str(job), "7"]
        for customer in workers.CUSTOMERS
        for job in range(workers.JOBS)
        for event in ("begin", "done")
    ]
    return [*jobs, ["ran", "cron", "1", "7"], ["ran", "cron", "2", "7"]]


BROKEN: dict[str, Callable[[list[list[str]]], list[list[str]]]] = {
    "two at a time": lambda log: [log[0], log[2], log[1], *log[3:]],
    "out of order": lambda log: [*log[2:4], *log[:2], *log[4:]],
    "not done": lambda log: [log[0], *log[2:]],
    "done twice": lambda log: [*log[:2], log[1], *log[2:]],
    "broken off by one that lives": lambda log: [["begin", "ann", "0", "8"], *log],
    "slot run twice": lambda log: [*log, ["ran", "cron", "2", "8"]],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_workers_judge_sees_broken_rules(broken: str) -> None:
    killed_in_between = [["begin", "ann", "0", "9"], *kept_rules()]
    assert list(workers.broken_rules(killed_in_between, "9", [-signal.SIGKILL, 0, 0])) == []
    assert len(list(workers.broken_rules(BROKEN[broken](kept_rules()), "9", [-signal.SIGKILL, 0, 0]))) == 1


def test_workers_judge_sees_unclean_ends() -> None:
    assert len(list(workers.broken_rules(kept_rules(), "9", [-signal.SIGKILL, 0, 1]))) == 1


async def test_workers_refuse_a_change_under_an_older_fence(redis: Redis, rival: Coordinator) -> None:
    lock = rival.lock("lock:ann")
    async with lock as older:
        pass
    async with lock as newer:
        await workers.fenced(redis, newer, "turn ann -")
        with pytest.raises(workers.LeaseLost):
            await workers.fenced(redis, older, "done ann 0", ["SET", "done", "1"])
        assert not await redis.exists("done")
        await workers.fenced(redis, newer, "done ann 0", ["SET", "done", "2"])
    assert await redis.get("done") == "2"


async def test_rate_gate_keeps_the_limit_over_processes() -> None:
    code, output = await run("-W", "error", "examples/rate_gate.py")
    assert code == 0, output
    assert output == "240 calls answered, 0 refused; at most 4 of 4 slots in use at a time\n"


async def test_rate_gate_without_the_gate_calls_would_be_refused() -> None:
    async with rate_gate.Api() as api, httpx.AsyncClient(base_url=api.url) as client:
        answers = await asyncio.gather(*(client.get("/now") for _ in range(8)), client.get("/export"))
    assert api.refused > 0
    assert [answer.status_code for answer in answers].count(429) == api.refused
    assert api.peak == 4


async def test_config_readers_see_whole_releases() -> None:
    code, output = await run("-W", "error", "examples/config_readers.py")
    assert code == 0, output
    first, second = output.splitlines()
    assert first == "release 12 reached, 8 times by an upgrade"
    assert second.endswith("reads were whole, 0 were torn")


async def test_config_readers_without_the_lock_would_see_half_of_a_change(redis: Redis, rival: Coordinator) -> None:
    config = config_readers.Config(redis, rival)
    async with config._lock.write() as lease:
        torn, release = False, 0
        async with asyncio.timeout(20):
            while not torn:
                release += 1
                storing = asyncio.create_task(config._store(release, lease))
                while not storing.done():
                    torn |= len(set(await config._load())) > 1
                await storing
    async with config._lock.write() as later:
        await config._store(1000, later)
        with pytest.raises(config_readers.LeaseLost):
            await config._store(1001, lease)
    assert await config.read() == [1000] * 3


# -- transfers ---------------------------------------------------------------------------------------------


async def test_transfers_lose_no_money() -> None:
    code, output = await run("-W", "error", "examples/transfer.py")
    assert code == 0, output
    assert output.splitlines()[-1].endswith("the sum is 500")


async def test_transfers_without_the_locks_would_lose_money(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLock:
        def __init__(self, *_: object) -> None:
            self.fences = {f"lock:{account}": 0 for account in transfer.ACCOUNTS}

        @asynccontextmanager
        async def hold(self, **_: object) -> AsyncIterator[NoLock]:
            yield self

    monkeypatch.setattr(transfer, "AsyncMultiLock", NoLock)
    for account in transfer.ACCOUNTS:
        await redis.hset(f"account:{account}", "balance", "100")
    await asyncio.gather(*(transfer.customer(redis, None, seed) for seed in range(40)))
    assert sum([await transfer.balance(redis, account) for account in transfer.ACCOUNTS]) != 500


async def test_transfer_refuses_to_write_under_an_older_fence(redis: Redis, rival: Coordinator) -> None:
    names = {"ann": "lock:ann", "bob": "lock:bob"}
    async with AsyncMultiLock(rival, names.values()) as older:
        pass
    async with AsyncMultiLock(rival, ["lock:bob", "lock:cy"]) as newer:
        await transfer.write(redis, newer, {"bob": 1, "cy": 2}, {"bob": "lock:bob", "cy": "lock:cy"})
    with pytest.raises(transfer.LeaseLost):
        await transfer.write(redis, older, {"ann": 7, "bob": 7}, names)
    assert [await transfer.balance(redis, account) for account in ("ann", "bob", "cy")] == [0, 1, 2]


# -- pytest fixtures ---------------------------------------------------------------------------------------


async def test_pytest_fixtures_pass() -> None:
    code, output = await run("-m", "pytest", "examples/pytest_fixtures.py")
    assert code == 0, output
    assert " 4 passed" in output


async def test_pytest_fixture_tells_of_a_lease_that_was_lost(tmp_path: Path) -> None:
    test = tmp_path / "test_lost.py"
    test.write_text(
        "from pytest_fixtures import *\n"
        "async def test_lost(sync, lease):\n"
        "    assert await sync.lock(lease.name).force_release()\n"
    )
    code, output = await run(
        "-m", "pytest", "-c", "pyproject.toml", f"--rootdir={tmp_path}", f"{test}::test_lost",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    )  # fmt: skip
    assert code == 1, output
    assert "1 passed, 1 error" in output
    assert "redis_sync_aio.errors.LeaseLost" in output


async def test_pytest_fixtures_work_in_strict_mode_too() -> None:
    code, output = await run("-m", "pytest", "-o", "asyncio_mode=strict", "examples/pytest_fixtures.py")
    assert code == 0, output
