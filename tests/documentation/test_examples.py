"""The examples do what they say: run as processes, and their parts in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from redis.asyncio import Redis

from redis_sync_aio import AsyncMultiLock, Coordinator, wait_until
from redis_sync_aio.contrib.fastapi import hold_lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing import run_lifespan

from ..conftest import MakeClient
from ..support.embedded import free_port

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import an example by its path: they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


workers = load("workers")
transfer = load("transfer")
order_saga = load("order_saga")
fastapi_service = load("fastapi_service")
aiohttp_service = load("aiohttp_service")


@pytest_asyncio.fixture
async def text(redis: Redis, make_client: MakeClient) -> Redis:
    """A client that decodes, as those of the examples do."""
    return make_client(decode_responses=True)


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


JOBS = "".join(rf" {job}:\S+" for job in range(workers.JOBS))
SAYS = {
    "config_readers": r"release 12 reached, 8 times by a reader\n\d+ .*reads were whole, 0 were torn\n",
    "handover": r"order 41: accepted busy\norder 42: accepted busy\norder 43: accepted busy\n"
    r"each order was worked on once, under its own lease: yes\n"
    r"messages that came twice and were passed over: 1\n",
    "leader": r"(?s).*a server was killed, and the leader went on\n"
    r".*the leader was killed, and another leads; fences rise\n.*",  # the rest is the log
    "nightly": r"runs that began, by slot: 1 1 2 1 1 1\nruns that ended, by slot: 1 1 1 1 1 1\n",
    "order_saga": r".*with refund, restock to run: 1 paid, 4 in stock, 0 shipped\n"
    r"undone: 0 paid, 5 in stock, 0 shipped\ndone: 1 paid, 4 in stock, 1 shipped\n",
    "rate_gate": r"240 calls answered, 0 refused; at most 4 of 4 slots in use at a time\n",
    "standby": r"(?s).*three processes led, one after the other: yes.*",
    "together": r"(?s).*the others learned of it and met again: yes.*",
    "transfer": r"(?s).*the sum is 500\n",
    "workers": rf"ann {JOBS}\nbob {JOBS}\ncy {JOBS}\ncron .*\nprocess .* was killed in the middle of job 5\n"
    r"no rule was broken\n",
}
"""The whole output of each example: a pattern."""


@pytest.mark.real
@pytest.mark.ci
@pytest.mark.parametrize("name", SAYS)
async def test_an_example_says_that_its_rules_were_kept(name: str) -> None:
    """Most kill or stop one of their processes on purpose."""
    code, output = await run("-W", "error", f"examples/{name}.py")
    assert code == 0, output
    said = re.sub(r" +", " ", output)
    assert re.fullmatch(SAYS[name].replace("  ", " "), said), output
    assert "Traceback" not in output


@pytest.mark.real
@pytest.mark.ci
@pytest.mark.parametrize(
    ("script", "url", "ends"),
    [
        ("fastapi_service.py", "/orders/1/items?price=3", -signal.SIGTERM),  # uvicorn passes the signal on, at the end
        ("aiohttp_service.py", "/accounts/ann/deposits?cents=7", 0),
    ],
)
async def test_a_service_runs_and_ends_cleanly(script: str, url: str, ends: int) -> None:
    pytest.importorskip("uvicorn")
    with free_port() as port:
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

                await wait_until(answers, timeout=60)
        finally:
            if process.returncode is None:
                process.terminate()
            output, _ = await process.communicate()
        assert process.returncode == ends, output.decode()
        assert "Traceback" not in output.decode()


@pytest.mark.real
@pytest.mark.ci
@pytest.mark.parametrize("mode", ["auto", "strict"])
async def test_the_pytest_fixtures_pass(mode: str) -> None:
    code, output = await run("-m", "pytest", "-n0", "-o", f"asyncio_mode={mode}", "examples/pytest_fixtures.py")
    assert code == 0, output
    assert " 4 passed" in output


@pytest.mark.real
@pytest.mark.ci
async def test_the_pytest_fixture_tells_of_a_lease_that_was_lost(tmp_path: Path) -> None:
    test = tmp_path / "test_lost.py"
    test.write_text(
        "from pytest_fixtures import *\n"
        "async def test_lost(sync, lease):\n"
        "    assert await sync.lock(lease.name).force_release()\n"
    )
    code, output = await run(
        "-m", "pytest", "-n0", "-c", "pyproject.toml", f"--rootdir={tmp_path}", f"{test}::test_lost",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    )  # fmt: skip
    assert code == 1, output
    assert "1 passed, 1 error" in output
    assert "redis_sync_aio.errors.LeaseLost" in output


# -- their judges, fences and steps -----------------------------------------------------------------------


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
def test_the_judge_of_the_workers_sees_broken_rules(broken: str) -> None:
    killed_in_between = [["begin", "ann", "0", "9"], *kept_rules()]
    ends = [-signal.SIGKILL, 0, 0]
    assert list(workers.broken_rules(killed_in_between, "9", ends)) == []
    assert len(list(workers.broken_rules(BROKEN[broken](kept_rules()), "9", ends))) == 1
    assert len(list(workers.broken_rules(kept_rules(), "9", [-signal.SIGKILL, 0, 1]))) == 1


async def test_workers_refuse_a_change_under_an_older_fence(text: Redis, sync: Coordinator) -> None:
    lock = sync.lock("lock:ann")
    async with lock as older:
        pass
    async with lock as newer:
        await workers.fenced(text, newer, "turn ann -")
        with pytest.raises(workers.LeaseLost):
            await workers.fenced(text, older, "done ann 0", ["SET", "done", "1"])
        assert not await text.exists("done")
        await workers.fenced(text, newer, "done ann 0", ["SET", "done", "2"])
    assert await text.get("done") == "2"


async def test_a_transfer_refuses_to_write_under_an_older_fence(text: Redis, sync: Coordinator) -> None:
    names = {"ann": "lock:ann", "bob": "lock:bob"}
    async with AsyncMultiLock(sync, names.values()) as older:
        pass
    async with AsyncMultiLock(sync, ["lock:bob", "lock:cy"]) as newer:
        await transfer.write(text, newer, {"bob": 1, "cy": 2}, {"bob": "lock:bob", "cy": "lock:cy"})
    with pytest.raises(transfer.LeaseLost):
        await transfer.write(text, older, {"ann": 7, "bob": 7}, names)
    assert [await transfer.balance(text, account) for account in ("ann", "bob", "cy")] == [0, 1, 2]


async def test_the_steps_of_the_saga_may_run_twice_and_for_nothing(text: Redis) -> None:
    shop = order_saga.Shop(text)
    await text.set("stock", "5")
    for step in shop.steps.values():
        await step(order="none")
    assert await shop.books() == "0 paid, 5 in stock, 0 shipped"
    await shop.charge("one")
    await shop.take("one")
    for step in [*shop.steps.values()] * 2:
        await step(order="one")
    assert await shop.books() == "0 paid, 5 in stock, 0 shipped"


# -- the services under requests -----------------------------------------------------------------------------


@asynccontextmanager
async def started(app: FastAPI, patience: float = 60) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose lifespan runs. ``patience``: how long it waits, instead of the example's own time."""
    other = hold_lock("lock:order:{order_id:int}", timeout=patience, ttl=10, leave_when_gone=True)
    assert other.dependency is not None
    app.dependency_overrides[fastapi_service.order_lock.dependency] = other.dependency
    async with (
        run_lifespan(app) as running,
        httpx.AsyncClient(transport=httpx.ASGITransport(running), base_url="http://x") as client,
    ):
        yield client


def served(url: str, patience: float = 60) -> TestClient[web.Request, web.Application]:
    return TestClient(TestServer(aiohttp_service.create_app(url, patience=patience)))


@pytest.mark.real
async def test_fastapi_requests_to_two_instances_lose_no_item(server: EmbeddedServer, redis: Redis) -> None:
    async with (
        started(fastapi_service.create_app(server.url)) as one,
        started(fastapi_service.create_app(server.url)) as two,
    ):
        answers = await asyncio.gather(*(it.post("/orders/1/items?price=3") for _ in range(10) for it in (one, two)))
        order = (await two.get("/orders/1")).json()
    assert [answer.status_code for answer in answers] == [200] * 20
    assert (order["items"], order["total"]) == (20, 60)
    saved = sorted((answer.json() for answer in answers), key=lambda order: order["fence"])
    assert [order["items"] for order in saved] == list(range(1, 21)), "the fences follow the order of the writes"


@pytest.mark.real
async def test_aiohttp_requests_to_two_instances_lose_no_cent(server: EmbeddedServer, redis: Redis) -> None:
    async def deposit(client: TestClient[web.Request, web.Application]) -> dict[str, int]:
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 200
            account: dict[str, int] = await answer.json()
            return account

    async with served(server.url) as one, served(server.url) as two:
        accounts = await asyncio.gather(*(deposit(client) for _ in range(10) for client in (one, two)))
        async with two.get("/accounts/ann") as answer:
            assert (await answer.json())["cents"] == 7 * 20
    in_order = sorted(accounts, key=lambda account: account["fence"])
    assert [account["cents"] for account in in_order] == [7 * n for n in range(1, 21)]


BUSY = {"detail": "other requests are at work on this: try again later"}


@pytest.mark.real
async def test_a_busy_order_or_account_is_423_and_a_fence_keeps_a_late_write_out(
    server: EmbeddedServer, text: Redis, sync: Coordinator
) -> None:
    """A late write is 503. Who gave up has left the queue; other orders are free."""
    far = 9 * 10**15
    await text.hset("order:3", mapping={"fence": far, "items": 5, "total": 50})
    await text.hset("account:bob", mapping={"fence": far, "cents": 5})
    order, account = (sync.lock(name, ttl=600, auto_renew=False) for name in ("lock:order:1", "lock:account:ann"))
    async with started(fastapi_service.create_app(server.url), 2) as fast, served(server.url, 2) as aio:

        async def got(client: Any, path: str) -> tuple[int, int, Any]:
            answer = await client.post(path)
            status = answer.status_code if client is fast else answer.status
            said = answer.json() if client is fast else await answer.json()
            return status, int(answer.headers.get("Retry-After", 0)), said

        leases = [await order.acquire(), await account.acquire()]
        for client, path in ((fast, "/orders/1/items?price=3"), (aio, "/accounts/ann/deposits?cents=7")):
            status, after, said = await got(client, path)
            assert (status, said) == (423, BUSY)
            assert 500 < after <= 600
        assert (await got(fast, "/orders/2/items?price=3"))[0] == 200
        assert [(await lock.statistics()).waiting for lock in (order, account)] == [0, 0]
        for lease in leases:
            await lease.release()
        for client, path in ((fast, "/orders/1/items?price=3"), (aio, "/accounts/ann/deposits?cents=7")):
            assert (await got(client, path))[0] == 200
        for client, path in ((fast, "/orders/3/items?price=3"), (aio, "/accounts/bob/deposits?cents=7")):
            assert (await got(client, path))[:2] == (503, 1)
    assert await text.hgetall("order:3") == {"fence": str(far), "items": "5", "total": "50"}
    assert await text.hgetall("account:bob") == {"fence": str(far), "cents": "5"}


@pytest.mark.real
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
