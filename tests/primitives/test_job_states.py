"""A call that does not run its job says why: the slot is done, is running, or an earlier run has failed.

Wherever a task is cancelled (P5), its job has run or runs again by the rule of the caller, and nothing stays locked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    Coordinator,
    idempotent,
    once,
    once_per,
    wait_until,
)
from redis_sync_aio.errors import RunInterrupted, WrongKeyType
from redis_sync_aio.inspection import MarkView, escape, inspect
from redis_sync_aio.instrumentation import Event, Granted, Skipped, observe_all
from redis_sync_aio.jobs import OnCrash

from ..support.body import FAST, for_ever
from ..support.sweep import Outcome, sweep

of_slots = pytest.mark.parametrize("on_crash", ["skip", "again"])


async def enters(sync: Coordinator, slot: object = "s", **options: Any) -> bool:
    async with once(sync, "job", slot=slot, **options) as lease:
        return lease is not None


class Told:
    """The events about jobs, and the lines of the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "redis_sync_aio")
        self.events: list[Event] = []
        self._caplog = caplog

    @property
    def skipped(self) -> list[tuple[str, str, str, str]]:
        return [(it.kind, it.name, it.pattern, it.state) for it in self.events if isinstance(it, Skipped)]

    @property
    def logged(self) -> list[tuple[str, Any, Any]]:
        records = [vars(record) for record in self._caplog.records]
        return [(it["levelname"], it["lock"], it["state"]) for it in records if it["event"] == "job_skipped"]

    @property
    def granted(self) -> int:
        return sum(isinstance(event, Granted) for event in self.events)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    found = Told(caplog)
    with observe_all(found.events.append):
        yield found


@of_slots
async def test_a_slot_that_is_done(sync: Coordinator, other: Coordinator, told: Told, on_crash: OnCrash) -> None:
    """It costs no lease, also while somebody else has the lock of that name."""
    assert await enters(sync, on_crash=on_crash)
    assert not told.logged
    assert not told.skipped
    async with sync.lock("job:s"):
        granted = told.granted
        assert not await enters(other, on_crash=on_crash)
        assert told.granted == granted
    assert told.skipped == [("job", "job:s", "job:*", "done")]
    assert told.logged == [("INFO", "job:s", "done")]


@of_slots
async def test_a_slot_that_is_running(sync: Coordinator, other: Coordinator, told: Told, on_crash: OnCrash) -> None:
    """Also without a mark: that of a run by "again" is written at its end."""
    async with once(sync, "job", slot="s", on_crash=on_crash):
        assert not await enters(other, on_crash="skip")
    assert told.logged == [("INFO", "job:s", "running")]
    assert [state for *_, state in told.skipped] == ["running"]


async def test_a_slot_whose_run_raised(sync: Coordinator, other: Coordinator, told: Told) -> None:
    """A retry by a queue returns None as if the job was done; the log and the events tell it apart."""
    calls: list[int] = []

    @once_per(lambda: sync if not calls else other, "nightly:{customer}", on_crash="skip")
    async def nightly(customer: str) -> str:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await nightly("ann")
    assert await nightly("ann") is None
    assert told.skipped == [("job", "nightly:ann", "nightly:{customer}", "failed")]
    assert told.logged == [("WARNING", "nightly:ann", "failed")]


async def test_a_slot_whose_run_lost_its_lock(sync: Coordinator, other: Coordinator, told: Told, redis: Redis) -> None:
    """As after a crash: the mark of its beginning is there, and the lock is free."""
    entered = asyncio.Event()

    async def run() -> None:
        async with once(sync, "job", slot="s", on_crash="skip"):
            entered.set()
            await for_ever()

    running = asyncio.create_task(run())
    await entered.wait()
    await redis.delete("job:s")
    assert not await enters(other, on_crash="skip")
    assert told.logged == [("WARNING", "job:s", "failed")]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# -- marks: looked at, forgotten, and of others ------------------------------------------------------------


async def view(sync: Coordinator, name: str) -> MarkView | None:
    (found,) = await inspect(sync, escape(name), idle=True)
    return found.mark


async def state(sync: Coordinator, name: str) -> str | None:
    found = await view(sync, name)
    return None if found is None else found.state


@pytest.mark.parametrize("prefix", ["", "app1:"])
@pytest.mark.parametrize("slot", ["2026-01-02", "{42}", "a:b"])
async def test_a_slot_is_seen_and_forgotten_by_its_name(redis: Redis, prefix: str, slot: str) -> None:
    """Whatever prefix and hash tag its keys have. A slot whose run failed runs again when it is forgotten."""
    async with Coordinator(redis, prefix=prefix) as sync:
        name = ""
        for _ in range(2):
            async with once(sync, "job", slot=slot, on_crash="skip") as lease:
                assert lease is not None
                assert await state(sync, lease.name) == "running"
            done = await view(sync, lease.name)
            assert done is not None
            assert done.state == "done"
            assert 80_000 < (done.remaining or 0) < 86_410
            assert await sync.forget("job", slot=slot)
            assert await view(sync, lease.name) is None
            name = lease.name
        assert not await sync.forget("job", slot=slot)
        with pytest.raises(ZeroDivisionError):
            async with once(sync, "job", slot=slot, on_crash="skip"):
                raise ZeroDivisionError
        assert await state(sync, name) == "failed"
        assert not await enters(sync, slot, on_crash="skip")
        assert await sync.forget(name)
        assert await enters(sync, slot, on_crash="skip")


async def test_a_pattern_finds_marks_of_names_that_are_forgotten_otherwise(sync: Coordinator, redis: Redis) -> None:
    """And only where idle names are asked for. A long result is not read."""

    @idempotent(sync, "pay:{request}")
    async def pay(request: str) -> str:
        return "x" * 100_000

    await pay("a:b")
    await pay("c")
    await redis.delete("{pay:a:b}:fence", "{pay:c}:fence")
    before = (await redis.info("stats"))["total_net_output_bytes"]
    found = await inspect(sync, "pay:*", idle=True)
    assert (await redis.info("stats"))["total_net_output_bytes"] - before < 50_000
    assert [(it.name, it.mark and it.mark.state) for it in found] == [("pay:a:b", "done"), ("pay:c", "done")]
    assert await inspect(sync, "pay:*") == ()
    assert await sync.forget("pay:c")
    assert [it.name for it in await inspect(sync, "pay:*", idle=True)] == ["pay:a:b"]


async def test_a_run_that_is_forgotten_is_remembered_when_it_ends(sync: Coordinator, other: Coordinator) -> None:
    """Nobody runs next to it."""
    async with once(sync, "job", slot="s", on_crash="skip"):
        assert await other.forget("job", slot="s")
        assert not await enters(other, on_crash="skip")
    assert not await enters(other, on_crash="skip")
    assert await state(other, "job:s") == "done"


FOREIGN: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "a list": lambda redis: redis.rpush("{job}:mark", "x"),
    "a text": lambda redis: redis.set("{job}:mark", "hello"),
    "other JSON": lambda redis: redis.set("{job}:mark", "[1]"),
    "a JSON object": lambda redis: redis.set("{job}:mark", '{"result": "1"}'),
    "bytes": lambda redis: redis.set("{job}:mark", b"\xff"),
}


@pytest.mark.parametrize("what", FOREIGN)
async def test_foreign_data_in_the_place_of_a_mark_is_named(sync: Coordinator, redis: Redis, what: str) -> None:
    await FOREIGN[what](redis)

    async def work() -> None:
        raise AssertionError("it runs")

    for on_crash in ("again", "raise"):
        with pytest.raises(WrongKeyType, match=r"\{job\}:mark"):
            await idempotent(sync, "job", on_crash=on_crash)(work)()
    for rule in ("skip", "again"):
        with pytest.raises(WrongKeyType, match=r"\{job\}:mark"):
            async with once(sync, "job", on_crash=rule):
                await work()


async def test_a_mark_of_another_kind_of_job_is_named(sync: Coordinator) -> None:
    async def work() -> int:
        return 1

    for rule in ("skip", "again"):
        assert await enters(sync, rule, on_crash=rule)
        with pytest.raises(WrongKeyType, match="idempotent"):
            await idempotent(sync, f"job:{rule}")(work)()
        assert await idempotent(sync, f"request:{rule}")(work)() == 1
        with pytest.raises(WrongKeyType, match="once"):
            async with once(sync, f"request:{rule}", on_crash=rule):
                raise AssertionError("it runs")


# -- cancelled at every suspension point, once and twice ----------------------------------------------------

NAME = "c"
twice = pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["once", "twice"])


@dataclass
class Runs:
    """How often the work has begun, and how often it has come to its end."""

    begun: int = 0
    ended: int = 0

    async def work(self) -> int:
        self.begun += 1
        await asyncio.sleep(0)
        self.ended += 1
        return self.ended


async def settled(redis: Redis, sync: Coordinator) -> None:
    """Wait until the lock is free, and nothing is queued."""
    for _ in range(2):  # behind what was in flight, and behind what undoes that
        await sync.lock(NAME).locked()

    async def free() -> bool:
        return not await redis.exists(NAME, f"{{{NAME}}}:queue", f"{{{NAME}}}:polls")

    await wait_until(free, FAST, timeout=60)


@twice
@pytest.mark.parametrize("on_crash", ["skip", "again"])
async def test_a_slot_runs_by_the_rule(
    sync: Coordinator, other: Coordinator, redis: Redis, on_crash: OnCrash, twice: bool
) -> None:
    """ "skip": at most once. "again": until it has come to its end. Nobody else has it after that."""
    runs = Runs()

    async def run(by: Coordinator = sync) -> None:
        async with once(by, NAME, on_crash=on_crash) as lease:
            if lease is not None:
                await runs.work()

    async def check(outcome: Outcome[None]) -> None:
        await settled(redis, sync)
        before = Runs(runs.begun, runs.ended)
        await run(other)
        if on_crash == "skip":
            assert runs.begun <= 1
        else:
            assert runs.ended == 1 or before.ended == 1
        if not outcome.cancelled:
            assert (runs.begun, runs.ended) == (1, 1)
        begun = runs.begun
        await run(other)
        assert runs.begun == begun, "it is not done after all"
        runs.begun = runs.ended = 0
        await redis.flushall()

    assert len((await sweep(run, check, twice=twice)).outcomes) > 9


@twice
@pytest.mark.parametrize("on_crash", ["again", "raise"])
async def test_a_request_is_executed_by_the_rule(
    sync: Coordinator, other: Coordinator, redis: Redis, on_crash: Literal["again", "raise"], twice: bool
) -> None:
    """What its first caller did not hear of is found by the next one: a result, that it was interrupted, or nothing."""
    runs = Runs()

    async def run(by: Coordinator = sync) -> int | None:
        try:
            return await idempotent(by, NAME, on_crash=on_crash)(runs.work)()
        except RunInterrupted:
            return None

    async def check(outcome: Outcome[int | None]) -> None:
        await settled(redis, sync)
        before = runs.ended
        result = await run(other)
        if on_crash == "raise":
            assert runs.begun <= 1
        else:
            assert result in (before, before + 1)
            assert result == runs.ended
        if not outcome.cancelled:
            assert (result, outcome.value, runs.begun) == (1, 1, 1)
        begun = runs.begun
        assert await run(other) == result
        assert runs.begun == begun
        runs.begun = runs.ended = 0
        await redis.flushall()

    assert len((await sweep(run, check, twice=twice)).outcomes) > 9
