"""A call that does not run its job says why: the slot is done, is running, or an earlier run has failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, NotHeld, idempotent, once, once_per
from redis_sync_aio.inspection import MarkView, escape, inspect
from redis_sync_aio.instrumentation import Event, Granted, Skipped, observe_all
from redis_sync_aio.jobs import OnCrash

BOTH = pytest.mark.parametrize("on_crash", ["skip", "again"])


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


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    found = Told(caplog)
    with observe_all(found.events.append):
        yield found


async def skipped(sync: Coordinator, on_crash: OnCrash = "skip") -> bool:
    async with once(sync, "nightly", slot="2026-01-02", on_crash=on_crash) as lease:
        return lease is None


@BOTH
async def test_a_slot_that_is_done(sync: Coordinator, other: Coordinator, told: Told, on_crash: OnCrash) -> None:
    assert not await skipped(sync, on_crash)
    assert not told.logged
    assert not told.skipped
    assert await skipped(other, on_crash)
    assert told.skipped == [("job", "nightly:2026-01-02", "nightly:*", "done")]
    assert told.logged == [("INFO", "nightly:2026-01-02", "done")]


async def test_a_slot_that_is_running(sync: Coordinator, other: Coordinator, told: Told) -> None:
    async with once(sync, "nightly", slot="2026-01-02", on_crash="skip") as lease:
        assert lease is not None
        assert await skipped(other)
    assert told.logged == [("INFO", "nightly:2026-01-02", "running")]
    assert [state for *_, state in told.skipped] == ["running"]


async def test_a_slot_that_is_running_without_a_mark(sync: Coordinator, other: Coordinator, told: Told) -> None:
    """That of a run by the other rule is written at its end."""
    async with once(sync, "nightly", slot="2026-01-02", on_crash="again"):
        assert await skipped(other)
    assert told.logged == [("INFO", "nightly:2026-01-02", "running")]


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
    leave = asyncio.Event()

    async def run() -> None:
        async with once(sync, "nightly", slot="2026-01-02", on_crash="skip") as lease:
            assert lease is not None
            entered.set()
            await leave.wait()

    entered = asyncio.Event()
    running = asyncio.create_task(run())
    await entered.wait()
    await redis.delete("nightly:2026-01-02")
    assert await skipped(other)
    assert told.logged == [("WARNING", "nightly:2026-01-02", "failed")]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@BOTH
@pytest.mark.real
async def test_a_slot_that_is_done_costs_no_lease(
    sync: Coordinator, other: Coordinator, redis: Redis, told: Told, on_crash: OnCrash
) -> None:
    """Also while somebody else has the lock of that name."""
    assert not await skipped(sync, on_crash)
    async with sync.lock("nightly:2026-01-02"):
        granted = len([event for event in told.events if isinstance(event, Granted)])
        await other.lock("connected").locked()
        before = (await redis.info("stats"))["total_commands_processed"]
        assert await skipped(other, on_crash)
        done = (await redis.info("stats"))["total_commands_processed"] - before
        assert len([event for event in told.events if isinstance(event, Granted)]) == granted
    # The script and the command in it, once the server knows the script; renewals may come between.
    assert done <= 5


# -- the object --------------------------------------------------------------------------------------------


async def told_nothing() -> None: ...


async def test_once_is_no_decorator(sync: Coordinator) -> None:
    """A slip for `once_per`, which would run the function at every call."""
    decorate: Any = once(sync, "job")
    with pytest.raises(TypeError, match=r"decorate .* with once_per\(client, 'job'\)"):
        decorate(told_nothing)


async def test_once_is_entered_once(sync: Coordinator) -> None:
    entry = once(sync, "job")
    async with entry as lease:
        assert lease is not None
        with pytest.raises(RuntimeError, match="entered before"):
            await entry.__aenter__()
    with pytest.raises(RuntimeError, match="entered before"):
        await entry.__aenter__()


async def test_once_is_not_left_before_it_is_entered(sync: Coordinator) -> None:
    with pytest.raises(NotHeld):
        await once(sync, "job").__aexit__(None, None, None)


# -- looking and forgetting ----------------------------------------------------------------------------------


async def view(sync: Coordinator, name: str) -> MarkView | None:
    (found,) = await inspect(sync, escape(name), idle=True)
    return found.mark


@pytest.mark.parametrize("prefix", ["", "app1:"])
@pytest.mark.parametrize("slot", ["2026-01-02", "{42}", "a:b"])
async def test_a_slot_is_seen_and_forgotten_by_its_name(redis: Redis, prefix: str, slot: str) -> None:
    """Whatever prefix and hash tag its keys have."""
    async with Coordinator(redis, prefix=prefix) as sync:
        for _ in range(2):
            async with once(sync, "nightly", slot=slot, on_crash="skip") as lease:
                assert lease is not None
                running = await view(sync, lease.name)
                assert running is not None
                assert running.state == "running"
            done = await view(sync, lease.name)
            assert done is not None
            assert done.state == "done"
            assert 80_000 < (done.remaining or 0) < 86_410
            assert await sync.forget("nightly", slot=slot)
            assert await view(sync, lease.name) is None
        assert not await sync.forget("nightly", slot=slot)


async def test_a_slot_that_failed_is_seen_and_runs_again_when_it_is_forgotten(sync: Coordinator) -> None:
    with pytest.raises(ZeroDivisionError):
        async with once(sync, "nightly", slot="2026-01-02", on_crash="skip"):
            raise ZeroDivisionError
    failed = await view(sync, "nightly:2026-01-02")
    assert failed is not None
    assert failed.state == "failed"
    assert await skipped(sync)
    assert await sync.forget("nightly:2026-01-02")
    assert not await skipped(sync)


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
    """It goes on, and nobody runs next to it."""
    async with once(sync, "nightly", slot="2026-01-02", on_crash="skip") as lease:
        assert lease is not None
        assert await other.forget("nightly", slot="2026-01-02")
        assert await skipped(other)
    assert await skipped(other)
    done = await view(other, "nightly:2026-01-02")
    assert done is not None
    assert done.state == "done"


@pytest.mark.parametrize(("name", "slot"), [("", ""), (None, ""), (b"nightly", ""), ("nightly", None)])
async def test_bad_arguments_of_forget(sync: Coordinator, name: Any, slot: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"name|slot"):
        await sync.forget(name, slot=slot)
