"""What follows the work of a job: its result is kept, or it is known why not; it never runs again for that.

Also the calls that come while it runs: they are refused, or get the result together, over one connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, WouldDeadlock, idempotent, once, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import FingerprintMismatch, ResultNotKept, RunInterrupted, WrongKeyType
from redis_sync_aio.jobs import Codec
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.wired import MARK

both = pytest.mark.parametrize("on_crash", ["again", "raise"])


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


NOT_KEPT: dict[str, tuple[Any, Codec, str]] = {
    "a dataclass": (Receipt(1), json, "Receipt is not JSON serializable"),
    "a datetime": (datetime(2026, 1, 1, tzinfo=UTC), json, "datetime is not JSON serializable"),
    "tuples as keys": ({(1, 2): 3}, json, "keys must be"),
    "a codec that cannot read": ("x", Unreadable(), "RecursionError: too deep"),
    "a codec that makes bytes": ("x", Bytes(), "must return str, not b'"),
}


# -- a result that cannot be kept --------------------------------------------------------------------------


@both
@pytest.mark.parametrize("what", NOT_KEPT)
async def test_a_result_that_cannot_be_kept_is_returned_and_the_work_not_repeated(
    sync: Coordinator,
    other: Coordinator,
    caplog: pytest.LogCaptureFixture,
    on_crash: Literal["again", "raise"],
    what: str,
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


async def test_a_result_that_cannot_be_read_any_more_names_the_cause(sync: Coordinator) -> None:
    async def work() -> str:
        return "x"

    assert await idempotent(sync, "pay")(work)() == "x"
    with pytest.raises(ResultNotKept, match="too deep"):
        await idempotent(sync, "pay", codec=Unreadable())(work)()


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


# -- a task that is cancelled after the work ---------------------------------------------------------------


async def once_again(sync: Coordinator, work: Callable[[], Awaitable[int]]) -> int | None:
    async with once(sync, "pay", on_crash="again") as lease:
        return None if lease is None else await work()


async def idempotent_again(sync: Coordinator, work: Callable[[], Awaitable[int]]) -> int | None:
    return await idempotent(sync, "pay")(work)()


async def idempotent_raise(sync: Coordinator, work: Callable[[], Awaitable[int]]) -> int | None:
    return await idempotent(sync, "pay", on_crash="raise")(work)()


@pytest.mark.parametrize("job", [once_again, idempotent_again, idempotent_raise])
@pytest.mark.parametrize("by", ["a timeout", "a failing sibling"])
async def test_the_mark_is_written_when_the_task_is_cancelled_after_the_work(
    server: EmbeddedServer,
    other: Coordinator,
    job: Callable[[Coordinator, Callable[[], Awaitable[int]]], Awaitable[int | None]],
    by: str,
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
        for coordinator in (sync, other):
            with pytest.raises(FingerprintMismatch):
                await pay(coordinator, 2)
        if early is not None:
            with pytest.raises(FingerprintMismatch):
                await early
    if timeout == 0:
        with pytest.raises(AcquireTimeout):
            await pay(other, 1)
    leave.set()
    assert await first == 1


async def test_many_callers_of_one_key_get_its_result_together(server: EmbeddedServer, redis: Redis) -> None:
    """1 ms from the (empty) server, over one connection per process; they wait for the result, not for each other."""
    callers, runs = 300, 0
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
            await wait_until(lambda: sum(proxy.commands.values()) > 2 * callers, FAST, timeout=30)
            await wait_until(waits(sync.lock("pay")), FAST, timeout=30)
            asked, before = proxy.connections, sum(proxy.commands.values())
            leave.set()
            assert await asyncio.gather(*calls) == [1] * 2 * callers
            assert runs == 1
            assert asked <= 6
            assert sum(proxy.commands.values()) - before < 20, "each caller asked the server"


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


# -- marks that are found ----------------------------------------------------------------------------------


async def interrupted(sync: Coordinator) -> None:
    """Leave the mark of a run that did not end."""
    entered = asyncio.Event()

    @idempotent(sync, "transfer:{{7}}", on_crash="raise")
    async def transfer() -> None:
        entered.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(transfer())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_error_for_an_interrupted_run_names_the_key_to_delete(redis: Redis) -> None:
    """With a prefix and with braces in the key; after the deletion the next call runs."""
    async with Coordinator(redis, prefix="app1:") as sync:
        await interrupted(sync)

        @idempotent(sync, "transfer:{{7}}", on_crash="raise")
        async def transfer() -> str:
            return "done"

        with pytest.raises(RunInterrupted) as refused:
            await transfer()
        assert repr(refused.value.mark) in str(refused.value)
        assert await redis.delete(refused.value.mark) == 1
        assert await transfer() == "done"


async def test_an_interrupted_run_is_repeated_after_a_deployment_with_again(sync: Coordinator) -> None:
    await interrupted(sync)

    @idempotent(sync, "transfer:{{7}}", on_crash="again")
    async def transfer() -> str:
        return "done"

    assert await transfer() == await transfer() == "done"


FOREIGN: dict[str, Callable[[Redis], Awaitable[Any]]] = {
    "a list": lambda redis: redis.rpush("{job}:mark", "x"),
    "a text": lambda redis: redis.set("{job}:mark", "hello"),
    "other JSON": lambda redis: redis.set("{job}:mark", "[1]"),
    "a JSON object": lambda redis: redis.set("{job}:mark", '{"result": "1"}'),
    "bytes": lambda redis: redis.set("{job}:mark", b"\xff"),
}


@pytest.mark.parametrize("what", FOREIGN)
async def test_what_is_no_mark_is_named(sync: Coordinator, redis: Redis, what: str) -> None:
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

    for on_crash in ("skip", "again"):
        async with once(sync, f"slot:{on_crash}", on_crash=on_crash) as lease:
            assert lease is not None
        with pytest.raises(WrongKeyType, match="idempotent"):
            await idempotent(sync, f"slot:{on_crash}")(work)()
        assert await idempotent(sync, f"request:{on_crash}")(work)() == 1
        with pytest.raises(WrongKeyType, match="once"):
            async with once(sync, f"request:{on_crash}", on_crash=on_crash):
                raise AssertionError("it runs")


# -- the server --------------------------------------------------------------------------------------------


async def test_a_result_is_kept_when_the_server_is_out_of_memory(sync: Coordinator, redis: Redis) -> None:
    async def work() -> int:
        await redis.config_set("maxmemory", 1)
        return 1

    async def refused() -> int:
        raise AssertionError("it runs again")

    try:
        assert await idempotent(sync, "pay")(work)() == 1
        await redis.config_set("maxmemory", 0)
        async with once(sync, "job", on_crash="again") as lease:
            assert lease is not None
            await work()
    finally:
        await redis.config_set("maxmemory", 0)
    assert await idempotent(sync, "pay")(refused)() == 1
    async with once(sync, "job", on_crash="again") as lease:
        assert lease is None


@both
@pytest.mark.parametrize("refusals", [1, 2], ids=["the result", "everything"])
async def test_a_result_that_the_server_refuses_is_returned(
    server: EmbeddedServer, other: Coordinator, on_crash: Literal["again", "raise"], refusals: int
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
            for on_crash in ("skip", "again"):
                async with once(sync, "job", slot=on_crash, on_crash=on_crash) as lease:
                    assert lease is not None
                async with once(sync, "job", slot=on_crash, on_crash=on_crash) as lease:
                    assert lease is None
    finally:
        await untyped.acl_deluser("jobs")
