"""The examples do what they say: run as processes; see test_examples_web for the services under requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncMultiLock, Coordinator, wait_until

from ..support.embedded import free_port
from ..support.examples import load
from ..support.examples import redis as redis
from ..support.examples import rival as rival
from ..support.examples import server as server

pytestmark = pytest.mark.timing
ROOT = Path(__file__).parents[2]


workers = load("workers")
rate_gate = load("rate_gate")
config_readers = load("config_readers")
transfer = load("transfer")
order_saga = load("order_saga")


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


@pytest.mark.ci
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
    with free_port() as port:
        await runs_and_ends_cleanly(script, url, ends, port)


async def runs_and_ends_cleanly(script: str, url: str, ends: int, port: int) -> None:
    """Run a service, ask it, and end it by SIGTERM."""
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


@pytest.mark.ci
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


@pytest.mark.ci
async def test_rate_gate_keeps_the_limit_over_processes() -> None:
    code, output = await run("-W", "error", "examples/rate_gate.py")
    assert code == 0, output
    assert output == "240 calls answered, 0 refused; at most 4 of 4 slots in use at a time\n"


async def test_rate_gate_without_the_gate_calls_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, everybody = list[object](), asyncio.Event()

    class Api(rate_gate.Api):  # type: ignore[name-defined, misc]
        """Answers nobody before all have asked."""

        async def _answer(self, request: object) -> object:
            asked.append(request)
            if len(asked) == 9:
                everybody.set()
            return await super()._answer(request)

    async def until_all_asked(_: float) -> None:
        await everybody.wait()

    monkeypatch.setattr(rate_gate, "asyncio", SimpleNamespace(sleep=until_all_asked))
    async with Api() as api, httpx.AsyncClient(base_url=api.url, timeout=60) as client:
        answers = await asyncio.gather(*(client.get("/now") for _ in range(8)), client.get("/export"))
    assert api.refused > 0
    assert [answer.status_code for answer in answers].count(429) == api.refused
    assert api.peak == 4


@pytest.mark.ci
async def test_config_readers_see_whole_releases() -> None:
    code, output = await run("-W", "error", "examples/config_readers.py")
    assert code == 0, output
    first, second = output.splitlines()
    assert first == "release 12 reached, 8 times by a reader"
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


# -- a leader ----------------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_the_leader_outlives_a_server_and_is_followed_by_another() -> None:
    code, output = await run("-W", "error", "examples/leader.py")
    assert code == 0, output
    said = [line for line in output.splitlines() if line.startswith(("a server", "the leader"))]  # the rest is the log
    assert said == [
        "a server was killed, and the leader went on",
        "the leader was killed, and another leads; fences rise",
    ]


@pytest.mark.ci
async def test_a_leader_that_is_stopped_or_killed_is_followed_by_another() -> None:
    code, output = await run("-W", "error", "examples/standby.py")
    assert code == 0, output
    assert "three processes led, one after the other: yes" in output


# -- work that is handed over, and work that is done once --------------------------------------------------


@pytest.mark.ci
async def test_a_worker_releases_what_the_api_has_taken() -> None:
    code, output = await run("-W", "error", "examples/handover.py")
    assert code == 0, output
    assert output.splitlines() == [
        *(f"order {order}: accepted busy" for order in ("41", "42", "43")),
        "each order was worked on once, under its own lease: yes",
        "messages that came twice and were passed over: 1",
    ]


@pytest.mark.ci
@pytest.mark.timing
async def test_each_slot_of_a_schedule_comes_to_its_end_once() -> None:
    code, output = await run("-W", "error", "examples/nightly.py")
    assert code == 0, output
    assert output == "runs that began, by slot: 1 1 2 1 1 1\nruns that ended, by slot: 1 1 1 1 1 1\n"


@pytest.mark.ci
async def test_processes_that_wait_for_each_other_learn_that_one_was_killed() -> None:
    code, output = await run("-W", "error", "examples/together.py")
    assert code == 0, output
    assert "the others learned of it and met again: yes" in output


# -- transfers ---------------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_transfers_lose_no_money() -> None:
    code, output = await run("-W", "error", "examples/transfer.py")
    assert code == 0, output
    assert output.splitlines()[-1].endswith("the sum is 500")


async def test_two_transfers_without_the_locks_lose_money(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    both_are_in = asyncio.Barrier(2)

    class NoLock:
        def __init__(self, *_: object) -> None:
            self.fences = {f"lock:{account}": 0 for account in transfer.ACCOUNTS}

        @asynccontextmanager
        async def acquire(self, **_: object) -> AsyncIterator[NoLock]:
            yield self

    async def read_before_either_writes(redis: Redis, account: str) -> int:
        found: int = await balance(redis, account)
        await both_are_in.wait()
        return found

    balance = transfer.balance
    monkeypatch.setattr(transfer, "AsyncMultiLock", NoLock)
    monkeypatch.setattr(transfer, "balance", read_before_either_writes)
    for account in ("ann", "bob", "cy"):
        await redis.hset(f"account:{account}", "balance", "100")
    async with asyncio.timeout(30):
        await asyncio.gather(
            transfer.transfer(redis, None, "ann", "bob", 10),
            transfer.transfer(redis, None, "bob", "cy", 20),
        )
    # Both read 100 for bob; the later write hides the earlier one.
    assert sum([await balance(redis, account) for account in ("ann", "bob", "cy")]) in (290, 320)


async def test_transfer_refuses_to_write_under_an_older_fence(redis: Redis, rival: Coordinator) -> None:
    names = {"ann": "lock:ann", "bob": "lock:bob"}
    async with AsyncMultiLock(rival, names.values()) as older:
        pass
    async with AsyncMultiLock(rival, ["lock:bob", "lock:cy"]) as newer:
        await transfer.write(redis, newer, {"bob": 1, "cy": 2}, {"bob": "lock:bob", "cy": "lock:cy"})
    with pytest.raises(transfer.LeaseLost):
        await transfer.write(redis, older, {"ann": 7, "bob": 7}, names)
    assert [await transfer.balance(redis, account) for account in ("ann", "bob", "cy")] == [0, 1, 2]


# -- a saga ------------------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_order_saga_is_undone_by_the_next_holder() -> None:
    code, output = await run("-W", "error", "examples/order_saga.py")
    assert code == 0, output
    abandoned, undone, done = output.splitlines()
    assert abandoned.endswith("with refund, restock to run: 1 paid, 4 in stock, 0 shipped")
    assert undone == "undone: 0 paid, 5 in stock, 0 shipped"
    assert done == "done: 1 paid, 4 in stock, 1 shipped"


async def test_order_saga_s_steps_may_run_twice_and_for_nothing(redis: Redis) -> None:
    shop = order_saga.Shop(redis)
    await redis.set("stock", "5")
    for step in shop.steps.values():
        await step(order="none")
    assert await shop.books() == "0 paid, 5 in stock, 0 shipped"
    await shop.charge("one")
    await shop.take("one")
    for step in [*shop.steps.values()] * 2:
        await step(order="one")
    assert await shop.books() == "0 paid, 5 in stock, 0 shipped"


# -- pytest fixtures ---------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_pytest_fixtures_pass() -> None:
    code, output = await run("-m", "pytest", "-n0", "examples/pytest_fixtures.py")
    assert code == 0, output
    assert " 4 passed" in output


@pytest.mark.ci
async def test_pytest_fixture_tells_of_a_lease_that_was_lost(tmp_path: Path) -> None:
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


@pytest.mark.ci
async def test_pytest_fixtures_work_in_strict_mode_too() -> None:
    code, output = await run("-m", "pytest", "-n0", "-o", "asyncio_mode=strict", "examples/pytest_fixtures.py")
    assert code == 0, output
