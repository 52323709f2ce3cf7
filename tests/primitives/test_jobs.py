"""Work that is done once, for each slot of a schedule and each key of a request, over processes that are killed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost, idempotent, once, once_per, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.jobs import OnCrash

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.child import Answer, Child, Crew

SLOTS = 12
CRASHES = 7
"""The slot whose first run is killed."""
PROCESSES = 5


# -- in children -------------------------------------------------------------------------------------------


async def run_slots(sync: Coordinator, on_crash: OnCrash, first: str) -> dict[str, object]:
    """Run all slots; each process begins at another one, as if its clock was ahead of the others'."""
    client: Any = sync.client
    for number in range(SLOTS):
        slot = (number + int(first)) % SLOTS
        async with once(sync, "job", slot=slot, on_crash=on_crash, ttl=5) as lease:
            if lease is None:
                continue
            if await client.incr(f"began:{slot}") == 1 and slot == CRASHES:
                os.kill(os.getpid(), signal.SIGKILL)
            await client.incr(f"ended:{slot}")
    return {}


async def all_run(crew: list[Child], server: EmbeddedServer, job: str, *words: object) -> list[Answer]:
    """Let all children do ``job``, and return the answers of those that live."""
    for child in crew:
        await child.open(server.url, claim=None)
    answers = [child.run(f"{__name__}:{job}", *words, number) for number, child in enumerate(crew)]
    found = await asyncio.gather(*answers, return_exceptions=True)
    for one in found:
        assert isinstance(one, (Answer, asyncio.CancelledError)), one
    return [one for one in found if isinstance(one, Answer)]


@pytest.mark.parametrize("on_crash", ["skip", pytest.param("again", marks=pytest.mark.ci)])
@pytest.mark.real
async def test_each_slot_runs_once_over_processes(redis: Redis, server: EmbeddedServer, on_crash: OnCrash) -> None:
    """But for the slot whose first run was killed: it is skipped, or runs again, by the rule of the caller."""
    with Crew() as crew, crew.children(PROCESSES) as children:
        assert len(await all_run(children, server, "run_slots", on_crash)) == PROCESSES - 1
    for slot in range(SLOTS):
        found = [int(await redis.get(f"{what}:{slot}") or b"0") for what in ("began", "ended")]
        expected = [1, 1] if slot != CRASHES else [1, 0] if on_crash == "skip" else [2, 1]
        assert found == expected, slot


# -- once --------------------------------------------------------------------------------------------------


async def enters(sync: Coordinator, slot: object = "s", **options: Any) -> bool:
    async with once(sync, "job", slot=slot, **options) as lease:
        return lease is not None


@pytest.mark.parametrize("on_crash", ["skip", "again"])
async def test_one_of_several_enters_and_the_mark_outlasts_the_lock(
    sync: Coordinator, other: Coordinator, redis: Redis, on_crash: OnCrash
) -> None:
    found = await asyncio.gather(*(enters(one, on_crash=on_crash) for one in (sync, other) * 3))
    assert sum(found) == 1
    assert not await enters(other, on_crash=on_crash)
    assert await enters(other, "another slot", on_crash=on_crash)
    assert await redis.exists("job:s") == 0
    (mark,) = [key async for key in redis.scan_iter("*job:s*:mark")]
    assert 80_000_000 < await redis.pttl(mark) < 86_410_000


async def test_a_slot_is_done_for_the_time_that_was_asked_for(sync: Coordinator) -> None:
    assert await enters(sync, keep=timedelta(seconds=0.3))

    async def again() -> bool:
        return await enters(sync, keep=0.3)

    await wait_until(again, FAST, timeout=20)


@pytest.mark.parametrize("on_crash", ["skip", "again"])
async def test_a_run_that_raises_counts_as_crashed(sync: Coordinator, on_crash: OnCrash) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with once(sync, "job", on_crash="again"):
                raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        async with once(sync, "job", slot=1, on_crash=on_crash):
            raise ZeroDivisionError
    assert await enters(sync, 1, on_crash=on_crash) is (on_crash == "again")


async def test_a_run_that_crashed_is_repeated_unless_that_is_forbidden(sync: Coordinator) -> None:
    """Each of the three does so without being asked."""
    runs: list[str] = []

    async def in_a_slot() -> None:
        async with once(sync, "once") as lease:
            if lease is not None:
                await crashes_first("once")

    async def crashes_first(job: str) -> str:
        runs.append(job)
        if runs.count(job) == 1:
            raise asyncio.CancelledError
        return job

    jobs = {
        "once": in_a_slot,
        "once_per": once_per(sync, "once_per")(functools.partial(crashes_first, "once_per")),
        "idempotent": idempotent(sync, "idempotent")(functools.partial(crashes_first, "idempotent")),
    }
    for name, job in jobs.items():
        with pytest.raises(asyncio.CancelledError):
            await job()
        await job()
        await job()
        assert runs.count(name) == 2


async def test_a_busy_lock_is_skipped_or_waited_for(sync: Coordinator, other: Coordinator) -> None:
    async with once(sync, "job", slot="s", on_crash="again"):
        assert not await enters(other, on_crash="skip")
        with pytest.raises(AcquireTimeout):
            await asyncio.create_task(enters(other, on_crash="again", timeout=0.01))
        waiting = asyncio.create_task(enters(other, on_crash="again"))
        await wait_until(waits(sync.lock("job:s")), FAST, timeout=20)
    assert not await waiting


async def test_a_lost_lease_marks_nothing(sync: Coordinator, redis: Redis) -> None:
    """Whose lock was taken meanwhile cannot say that the slot is done."""
    with pytest.raises(LeaseLost):
        async with once(sync, "job", slot="s", on_crash="again"):
            await redis.set("job:s", "somebody else", px=60_000)
    await redis.delete("job:s")
    assert await enters(sync, on_crash="again")


@pytest.mark.real
async def test_the_name_of_a_slot_is_made_of_the_time_and_the_arguments(sync: Coordinator, redis: Redis) -> None:
    far = timezone(timedelta(hours=14))

    @once_per(lambda: sync, "report:{customer}:{now:%Y-%m-%d}", tz=far)
    async def report(customer: int, way: str = "mail") -> tuple[int, str]:
        return customer, way

    before = datetime.now(far).date()
    assert await report(7) == (7, "mail")
    assert await report(8, way="post") == (8, "post")
    after = datetime.now(far).date()
    if before == after:
        assert await report(7) is None
        assert {key async for key in redis.scan_iter("*report:7*:mark")} == {f"{{report:7:{before}}}:mark".encode()}


async def test_bad_arguments_of_once(sync: Coordinator) -> None:
    async def function(item: int) -> None: ...

    no_function: Any = print
    with pytest.raises(ValueError, match="on_crash"):
        once(sync, "job", on_crash="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        once(sync, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep"):
        once(sync, "job", keep=0)
    with pytest.raises(ValueError, match=r"refers to 'day', which .*function\(\) does not take"):
        once_per(sync, "job:{day}")(function)
    with pytest.raises(TypeError, match="name"):
        once_per(sync, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="coroutine function"):
        once_per(sync, "job:{now:%Y}")(no_function)


# -- idempotent --------------------------------------------------------------------------------------------


async def test_all_calls_get_the_result_of_the_first(sync: Coordinator, make_client: MakeClient) -> None:
    """As the codec makes it of the text, the first one included; also on a client that decodes."""
    runs, used = list[int](), [sync]
    async with Coordinator(make_client(decode_responses=True)) as decoding:

        @idempotent(lambda: used[-1], "sum:{request}")
        async def add(request: str, *numbers: int) -> Any:
            runs.append(sum(numbers))
            return numbers, sum(numbers)

        found = await asyncio.gather(*(add("a", 1, 2) for _ in range(5)))
        used.append(decoding)
        assert [*found, await add("a", 3, 4)] == [[[1, 2], 3]] * 6
        assert await add("b", 3, 4) == [[3, 4], 7]
    assert runs == [3, 7]


async def test_a_codec_of_ones_own(sync: Coordinator) -> None:
    class Dates:
        def dumps(self, value: Any) -> str:
            return str(value.isoformat())

        def loads(self, text: str) -> datetime:
            return datetime.fromisoformat(text)

    @idempotent(sync, "date", codec=Dates())
    async def date() -> datetime:
        return datetime(2026, 1, 2, tzinfo=UTC)

    assert await date() == await date() == datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)])
async def test_a_call_that_does_not_wait(sync: Coordinator, timeout: Any) -> None:
    """It raises while another one runs, and gets the result once there is one, also while its lock is taken."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        entered.set()
        await leave.wait()
        return 1

    slow = idempotent(sync, "slow", timeout=timeout)(work)
    first = asyncio.create_task(idempotent(sync, "slow")(work)())
    await entered.wait()
    with pytest.raises(AcquireTimeout):
        await slow()
    leave.set()
    assert await first == 1
    async with AsyncLock(sync, "slow"):
        assert await slow() == 1


@pytest.mark.parametrize("on_crash", ["again", "raise"])
async def test_a_call_that_raises_keeps_nothing(sync: Coordinator, on_crash: Any) -> None:
    runs: list[int] = []

    @idempotent(sync, "fails", on_crash=on_crash)
    async def fails() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise ZeroDivisionError
        return len(runs)

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert await fails() == await fails() == 2


async def two() -> int:
    return 2


async def test_a_call_that_lost_its_lock_keeps_nothing(sync: Coordinator, redis: Redis) -> None:
    """The result is written only if the lease holds at that moment, by the server's word."""

    @idempotent(sync, "lost")
    async def lost() -> int:
        await redis.set("lost", "somebody else", px=60_000)
        return 1

    with pytest.raises(LeaseLost):
        await lost()
    await redis.delete("lost")
    assert await idempotent(sync, "lost")(two)() == 2


async def test_bad_arguments_of_idempotent(sync: Coordinator) -> None:
    async def function(item: int) -> None: ...

    for options, error in (
        ({"on_crash": "never"}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"timeout": "long"}, TypeError),
        ({"ttl": 0}, ValueError),
        ({"keep": 0}, ValueError),
        ({"on_crash": "skip"}, ValueError),
        ({"fingerprint": 5}, TypeError),
    ):
        untyped: Any = options
        with pytest.raises(error):
            idempotent(sync, "key", **untyped)
    for key, fingerprint in (("{day}", None), ("{item}", "{day}")):
        with pytest.raises(ValueError, match="day"):
            idempotent(sync, key, fingerprint=fingerprint)(function)
