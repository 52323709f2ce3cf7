"""Work that is done once, for each slot of a schedule and each key of a request: it never runs again for nothing.

A result is kept, or it is known why not. A call that does not run its job says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    Coordinator,
    LeaseLost,
    NotHeld,
    WouldDeadlock,
    idempotent,
    once,
    once_per,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import FingerprintMismatch, ResultNotKept, RunInterrupted
from redis_sync_aio.jobs import Codec, OnCrash
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, waits
from ..support.processes import Answer, Crew
from ..support.wired import MARK

Rule = Literal["again", "raise"]
of_slots = pytest.mark.parametrize("on_crash", ["skip", "again"])
of_requests = pytest.mark.parametrize("on_crash", ["again", "raise"])


async def enters(sync: Coordinator, slot: object = "s", **options: Any) -> bool:
    async with once(sync, "job", slot=slot, **options) as lease:
        return lease is not None


async def interrupted(job: Callable[[], Awaitable[object]], entered: asyncio.Event) -> None:
    """Run a job until it has begun, and cancel it."""
    running = asyncio.ensure_future(job())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# -- slots: `once` and `once_per` --------------------------------------------------------------------------

SLOTS = 12
CRASHES = 7
"""The slot whose first run is killed."""
PROCESSES = 5


async def run_slots(sync: Coordinator, on_crash: OnCrash, first: str) -> dict[str, object]:
    """In a child: run all slots; each process begins at another one, as if its clock was ahead of the others'."""
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


@pytest.mark.ci
@pytest.mark.real
@of_slots
async def test_each_slot_runs_once_over_processes(
    redis: Redis, server: EmbeddedServer, crew: Crew, on_crash: OnCrash
) -> None:
    """But for the slot whose first run was killed: it is skipped, or runs again, by the rule of the caller."""
    with crew.children(PROCESSES) as children:
        for child in children:
            await child.open(server.url, claim=None)
        answers = [child.run(run_slots, on_crash, number) for number, child in enumerate(children)]
        found = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(one, Answer) for one in found) == PROCESSES - 1
    for slot in range(SLOTS):
        counts = [int(await redis.get(f"{what}:{slot}") or b"0") for what in ("began", "ended")]
        expected = [1, 1] if slot != CRASHES else [1, 0] if on_crash == "skip" else [2, 1]
        assert counts == expected, slot


@of_slots
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


@of_slots
async def test_it_is_kept_from_the_beginning_of_a_run_or_from_its_end(sync: Coordinator, on_crash: OnCrash) -> None:
    """From the end if a crashed run is repeated: a run may take longer than ``keep``."""
    async with once(sync, "job", slot="s", on_crash=on_crash, keep=10) as lease:
        assert lease is not None
        await asyncio.sleep(8)
    await asyncio.sleep(4)
    assert await enters(sync, on_crash=on_crash, keep=10) is (on_crash == "skip")


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
    if before == datetime.now(far).date():
        assert await report(7) is None
        assert {key async for key in redis.scan_iter("*report:7*:mark")} == {f"{{report:7:{before}}}:mark".encode()}


async def nothing() -> None: ...


async def test_once_is_entered_once_and_is_no_decorator(sync: Coordinator) -> None:
    """A slip for `once_per`, which would run the function at every call."""
    entry = once(sync, "job")
    with pytest.raises(NotHeld):
        await entry.__aexit__(None, None, None)
    async with entry as lease:
        assert lease is not None
        with pytest.raises(RuntimeError, match="entered before"):
            await entry.__aenter__()
    with pytest.raises(RuntimeError, match="entered before"):
        await entry.__aenter__()
    decorate: Any = once(sync, "job")
    with pytest.raises(TypeError, match=r"decorate .* with once_per\(client, 'job'\)"):
        decorate(nothing)


# -- requests: `idempotent` --------------------------------------------------------------------------------


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


@of_requests
async def test_a_call_that_raises_keeps_nothing(sync: Coordinator, on_crash: Rule) -> None:
    runs: list[int] = []

    @idempotent(sync, "fails", on_crash=on_crash)
    async def fails() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise ZeroDivisionError
        return len(runs)

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert not await sync.forget("fails")
    assert await fails() == await fails() == 2


async def test_a_call_that_lost_its_lock_keeps_nothing(sync: Coordinator, redis: Redis) -> None:
    """The result is written only if the lease holds at that moment, by the server's word."""

    async def lost() -> int:
        await redis.set("lost", "somebody else", px=60_000)
        return 1

    async def two() -> int:
        return 2

    with pytest.raises(LeaseLost):
        await idempotent(sync, "lost")(lost)()
    await redis.delete("lost")
    assert await idempotent(sync, "lost")(two)() == 2


async def test_an_interrupted_run_is_repeated_only_by_the_rule_again(redis: Redis) -> None:
    """With a prefix and with braces in the key. The error names the key to delete, after which the next call runs."""
    async with Coordinator(redis, prefix="app1:") as sync:
        entered = asyncio.Event()

        async def transfer(amount: int) -> str:
            if not entered.is_set():
                entered.set()
                await for_ever()
            return "done"

        def call(on_crash: Rule, amount: int = 1) -> Awaitable[str]:
            return idempotent(sync, "transfer:{{7}}", on_crash=on_crash, fingerprint="{amount}")(transfer)(amount)

        await interrupted(lambda: call("raise"), entered)
        with pytest.raises(RunInterrupted) as refused:
            await call("raise")
        assert refused.value.name == "transfer:{7}"
        assert repr(refused.value.mark) in str(refused.value)
        with pytest.raises(FingerprintMismatch):
            await call("raise", 2)
        assert await redis.delete(refused.value.mark) == 1
        assert await call("raise") == "done"
        await redis.flushall()
        entered.clear()
        await interrupted(lambda: call("raise"), entered)
        assert await call("again") == await call("again") == "done"


# -- a result that cannot be kept --------------------------------------------------------------------------


@dataclasses.dataclass
class Receipt:
    number: int


class Unreadable:
    """A codec whose texts cannot be read back."""

    def dumps(self, value: Any) -> str:
        return str(value)

    def loads(self, text: str) -> Any:
        raise RecursionError("too deep")


class Bytes:
    """A codec that makes bytes, as some JSON libraries do."""

    def dumps(self, value: Any) -> Any:
        return json.dumps(value).encode()

    def loads(self, text: str) -> Any:
        return json.loads(text)


class Dates:
    def dumps(self, value: Any) -> str:
        return str(value.isoformat())

    def loads(self, text: str) -> datetime:
        return datetime.fromisoformat(text)


NOT_KEPT: dict[str, tuple[Any, Codec, str]] = {
    "a dataclass": (Receipt(1), json, "Receipt is not JSON serializable"),
    "tuples as keys": ({(1, 2): 3}, json, "keys must be"),
    "a codec that cannot read": ("x", Unreadable(), "RecursionError: too deep"),
    "a codec that makes bytes": ("x", Bytes(), "must return str, not b'"),
}


@of_requests
@pytest.mark.parametrize("what", NOT_KEPT)
async def test_a_result_that_cannot_be_kept_is_returned_and_the_work_not_repeated(
    sync: Coordinator, other: Coordinator, caplog: pytest.LogCaptureFixture, on_crash: Rule, what: str
) -> None:
    result, codec, cause = NOT_KEPT[what]
    runs = 0

    async def work() -> Any:
        nonlocal runs
        runs += 1
        return result

    assert await idempotent(sync, "pay", on_crash=on_crash, codec=codec)(work)() == result
    assert [getattr(record, "event", None) for record in caplog.records] == ["result_not_kept"]
    for coordinator in (sync, other):
        with pytest.raises(ResultNotKept, match=cause) as refused:
            await idempotent(coordinator, "pay", on_crash=on_crash, codec=codec)(work)()
        assert refused.value.mark == "{pay}:mark"
    assert runs == 1


async def test_a_result_is_read_by_the_codec(sync: Coordinator) -> None:
    """If that cannot read it any more, the error names the cause."""

    async def day() -> datetime:
        return datetime(2026, 1, 2, tzinfo=UTC)

    for _ in range(2):
        assert await idempotent(sync, "day", codec=Dates())(day)() == datetime(2026, 1, 2, tzinfo=UTC)
    with pytest.raises(ResultNotKept, match="too deep"):
        await idempotent(sync, "day", codec=Unreadable())(day)()


def test_an_annotation_that_json_cannot_represent_is_refused_at_decoration(redis: Redis) -> None:
    async def receipt() -> Receipt: ...  # type: ignore[empty-body]
    async def day() -> date | None: ...
    async def amounts() -> dict[str, list[Decimal]]: ...  # type: ignore[empty-body]
    async def pairs() -> dict[tuple[int, int], int]: ...  # type: ignore[empty-body]
    async def raw() -> bytes: ...  # type: ignore[empty-body]
    async def fine() -> dict[str, list[int | None]] | tuple[str, ...] | None: ...
    async def unknown() -> NotDefined: ...  # type: ignore[name-defined]  # noqa: F821
    async def anything() -> Any: ...

    for function, name in ((receipt, "Receipt"), (day, "date"), (amounts, "Decimal"), (pairs, "tuple"), (raw, "bytes")):
        work: Any = function
        with pytest.raises(TypeError, match=f"returns {name}, which JSON cannot represent.*codec"):
            idempotent(redis, "key")(work)
        idempotent(redis, "key", codec=Unreadable())(work)
    for accepted in (fine, unknown, anything):
        idempotent(redis, "key")(accepted)


@of_requests
@pytest.mark.parametrize("refusals", [1, 2], ids=["the result", "everything"])
async def test_a_result_that_the_server_refuses_is_returned(
    server: EmbeddedServer, other: Coordinator, on_crash: Rule, refusals: int
) -> None:
    """Later calls are told that it was not kept; if the server takes no mark at all, they go by ``on_crash``."""
    runs = 0
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client) as sync:

        async def work() -> int:
            nonlocal runs
            runs += 1
            if runs == 1:
                proxy.on(MARK, Action.answer_error("ERR too large"), times=refusals)
            return runs

        assert await idempotent(sync, "pay", on_crash=on_crash)(work)() == 1
    later = idempotent(other, "pay", on_crash=on_crash)(work)
    if refusals == 1:
        with pytest.raises(ResultNotKept, match="ERR too large"):
            await later()
    elif on_crash == "raise":
        with pytest.raises(RunInterrupted):
            await later()
    else:
        assert await later() == 2


async def test_a_result_is_kept_when_the_server_is_out_of_memory(sync: Coordinator, redis: Redis) -> None:
    async def work() -> int:
        await redis.config_set("maxmemory", 1)
        return 1

    async def refused() -> int:
        raise AssertionError("it runs again")

    try:
        assert await idempotent(sync, "pay")(work)() == 1
        await redis.config_set("maxmemory", 0)
        async with once(sync, "job", slot="s", on_crash="again"):
            await work()
    finally:
        await redis.config_set("maxmemory", 0)
    assert await idempotent(sync, "pay")(refused)() == 1
    assert not await enters(sync, on_crash="again")


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_jobs_run_where_scripts_are_not_allowed(redis: Redis, make_client: MakeClient, push: Push) -> None:
    untyped: Any = redis
    await untyped.acl_setuser("jobs", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all", "-eval"])
    await untyped.acl_setuser("jobs", enabled=True, commands=["-evalsha", "-script"])
    runs = 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise LookupError
        return runs

    try:
        async with make_client(username="jobs", password="any") as client, Coordinator(client, push=push) as sync:
            pay = idempotent(sync, "pay", on_crash="raise")(work)
            with pytest.raises(LookupError):
                await pay()
            assert await asyncio.gather(*(pay() for _ in range(5))) == [2] * 5
            for rule in ("skip", "again"):
                assert await enters(sync, rule, on_crash=rule)
                assert not await enters(sync, rule, on_crash=rule)
            async with once(sync, "job", slot="runs", on_crash="skip"):
                assert [key async for key in redis.scan_iter("*runs*:mark")], "a crash now would leave the mark"
    finally:
        await untyped.acl_deluser("jobs")


# -- a task that is cancelled after the work ---------------------------------------------------------------

Work = Callable[[], Awaitable[int]]


async def once_again(sync: Coordinator, work: Work) -> int | None:
    async with once(sync, "pay", on_crash="again") as lease:
        return None if lease is None else await work()


async def idempotent_again(sync: Coordinator, work: Work) -> int | None:
    return await idempotent(sync, "pay")(work)()


async def idempotent_raise(sync: Coordinator, work: Work) -> int | None:
    return await idempotent(sync, "pay", on_crash="raise")(work)()


@pytest.mark.parametrize("job", [once_again, idempotent_again, idempotent_raise])
@pytest.mark.parametrize("by", ["a timeout", "a failing sibling"])
async def test_the_mark_is_written_when_the_task_is_cancelled_after_the_work(
    server: EmbeddedServer, other: Coordinator, job: Callable[[Coordinator, Work], Awaitable[int | None]], by: str
) -> None:
    """The cancellation comes while the writing of the mark is in flight, and is delivered; nothing runs again."""
    runs = 0
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, exit_timeout=20) as sync:
        sent = asyncio.Event()

        async def work() -> int:
            nonlocal runs
            runs += 1
            proxy.latency = 0.3
            asyncio.get_running_loop().call_later(0.1, sent.set)
            return runs

        async def fail() -> None:
            await sent.wait()
            raise LookupError

        async def with_timeout() -> None:
            async with asyncio.timeout(None) as timer:
                asyncio.create_task(sent.wait()).add_done_callback(lambda _: timer.reschedule(0))
                await job(sync, work)

        async def with_sibling() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await job(sync, work)

        with pytest.raises((TimeoutError, ExceptionGroup)):
            await (with_timeout if by == "a timeout" else with_sibling)()
        assert await job(other, work) == (None if job is once_again else 1)
    assert runs == 1


# -- calls that come while it runs -------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 0])
async def test_another_request_is_refused_while_the_first_one_runs(
    sync: Coordinator, other: Coordinator, timeout: float | None
) -> None:
    """By each process, and by the one that runs it; not "in progress", which clients try again forever."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def work(amount: int) -> int:
        entered.set()
        await leave.wait()
        return amount

    def pay(by: Coordinator, amount: int) -> Awaitable[int]:
        return idempotent(by, "pay", fingerprint="{amount}", timeout=timeout)(work)(amount)

    first = asyncio.ensure_future(pay(sync, 1))
    early = asyncio.ensure_future(pay(sync, 2)) if timeout is None else None  # asks before the first one has begun
    await entered.wait()
    async with asyncio.timeout(20):
        for call in (pay(sync, 2), pay(other, 2), *([] if early is None else [early])):
            with pytest.raises(FingerprintMismatch) as refused:
                await call
            assert refused.value.name == "pay"
    if timeout == 0:
        with pytest.raises(AcquireTimeout):
            await pay(other, 1)
    leave.set()
    assert await first == await pay(other, 1) == 1


async def test_many_callers_of_one_key_get_its_result_together(server: EmbeddedServer, redis: Redis) -> None:
    """1 ms from the (empty) server, over one connection per process; they wait for the result, not for each other."""
    callers, runs = 100, 0
    async with FaultProxy(server) as proxy, proxy.client() as one, proxy.client() as two:
        proxy.latency = 0.001
        async with Coordinator(one) as sync, Coordinator(two) as other:
            leave = asyncio.Event()

            async def work() -> int:
                nonlocal runs
                runs += 1
                await leave.wait()
                return runs

            pay = [idempotent(by, "pay")(work) for by in (sync, other)]
            calls = [asyncio.ensure_future(pay[number % 2]()) for number in range(2 * callers)]
            await wait_until(lambda: proxy.commands.total() > 2 * callers, FAST, timeout=30)
            await wait_until(waits(sync.lock("pay")), FAST, timeout=30)
            asked, before = proxy.connections, proxy.commands.total()
            leave.set()
            assert await asyncio.gather(*calls) == [1] * 2 * callers
            assert runs == 1
            assert asked <= 6
            assert proxy.commands.total() - before < 20, "each caller asked the server"


async def test_another_call_takes_over_when_the_first_one_leaves(sync: Coordinator) -> None:
    """By an error, by a cancellation, and by its timeout: each of the others waits for its own time, and one runs."""
    entered, begun = asyncio.Queue[asyncio.Event](), 0

    async def work() -> int:
        nonlocal begun
        begun += 1
        number, leave = begun, asyncio.Event()
        entered.put_nowait(leave)
        await leave.wait()
        if number == 1:
            raise LookupError
        return number

    pay = idempotent(sync, "pay")(work)
    lock = await sync.lock("pay").acquire()
    short = asyncio.ensure_future(idempotent(sync, "pay", timeout=0.1)(work)())
    calls = [asyncio.ensure_future(pay()) for _ in range(4)]
    with pytest.raises(AcquireTimeout):
        await short
    await lock.release()
    (await entered.get()).set()
    with pytest.raises(LookupError):
        await calls[0]
    second = await entered.get()
    calls[1].cancel()
    third = await entered.get()
    assert not second.is_set()
    third.set()
    assert await asyncio.gather(*calls[2:]) == [3, 3]
    assert calls[1].cancelled()


async def test_a_call_of_the_same_key_inside_its_run_is_told_that_it_waits_for_itself(sync: Coordinator) -> None:
    async def work() -> int:
        with pytest.raises(WouldDeadlock):
            await pay()
        return 1

    pay = idempotent(sync, "pay")(work)
    async with asyncio.timeout(20):
        assert await pay() == 1
