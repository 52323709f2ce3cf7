"""P1, P6, FAULTS A6, D9, D16: renewals that are refused, put off, or late after a hand-over.

A renewal that is refused changes nothing. The loss says that the server refused, and the log says how. What is handed
over lasts for a claim until its first renewal; by default a stall of 4 seconds right then costs no lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Literal, TypeAlias

import pytest
import pytest_asyncio

from redis_sync_aio import AsyncLock, AsyncMultiLock, CommandRefused, Coordinator, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.instrumentation import Event, Lost, observe_all
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, waits
from ..support.inside import hub_of, now
from ..support.inspecting import calls
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import (
    ALONE,
    KINDS,
    LOCK,
    PRIMITIVES,
    READERS,
    SEMAPHORE,
    SHARED,
    WATCHED,
    WRITER,
    Client,
    Primitive,
    each,
)
from ..support.virtual import stall
from ..support.wired import RENEW, wired
from ..support.wired import quiet_loop as quiet_loop

NAME = "renewals"
ALLOWED = ("~*", "&*", "+@all")
NO_PROLONGING = ("-pexpire", "-zadd")
HINT = "Coordinator(claim=)"
Push: TypeAlias = Literal["auto", "never"]
Told: TypeAlias = Callable[[str], list[Any]]
pushes = pytest.mark.parametrize("push", ["auto", "never"])
primitives = each(PRIMITIVES)
kinds = pytest.mark.parametrize("kind", [LOCK, SEMAPHORE], ids=str)


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of this module, whose settings and users its tests change."""
    with EmbeddedServer(port=0) as server:
        yield server


@pytest_asyncio.fixture
async def admin(own: EmbeddedServer) -> AsyncIterator[Client]:
    async with own.client() as client:
        await client.flushall()
        yield client


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    with caplog.at_level(logging.INFO, "redis_sync_aio"):
        yield lambda event: [record for record in caplog.records if getattr(record, "event", None) == event]


def ends(lease: BaseLease) -> float:
    return now() + lease.remaining()


# -- refused by the ACL, in the middle of the script where that allows scripts ---------------------------------


async def rule(admin: Client, *rules: str) -> None:
    """Change what the user of the locks may do."""
    await admin.execute_command("ACL", "SETUSER", "locks", *rules)


@pytest_asyncio.fixture
async def limited(own: EmbeddedServer, admin: Client) -> AsyncIterator[Client]:
    """A client whose rights the test may change."""
    await rule(admin, "reset", "on", "nopass", *ALLOWED)
    async with own.client(username="locks", password="x") as client:
        yield client


@pushes
@primitives
@pytest.mark.parametrize("auto_renew", [True, False], ids=["renewed", "not renewed"])
@pytest.mark.parametrize("extends_to", [1, 300], ids=["shorter", "longer"])
async def test_an_extension_that_is_refused_changes_nothing(
    limited: Client, admin: Client, primitive: Primitive, push: Push, auto_renew: bool, extends_to: float
) -> None:
    """The lease ends as before, and the renewals go on with the ttl that it had."""
    async with Coordinator(limited, push=push) as sync:
        lease = await primitive.make(sync, NAME, auto_renew=auto_renew).acquire()
        before = ends(lease)
        await rule(admin, *NO_PROLONGING)
        with pytest.raises(PermissionDenied):
            await lease.extend(extends_to)
        assert abs(ends(lease) - before) < 0.1
        await rule(admin, *ALLOWED)
        if auto_renew:
            await wait_until(lambda: ends(lease) > before + 0.2, FAST, timeout=20)
        assert 20 < lease.remaining() <= 30
        lease.check()
        await lease.release()


async def test_a_lock_of_several_that_is_refused_for_one_changes_nothing(limited: Client, admin: Client) -> None:
    """The ACL allows one of the keys: what was extended there is taken back."""
    async with Coordinator(limited) as sync:
        lease = await AsyncMultiLock(sync, ["a", "b"]).acquire()
        await rule(admin, "resetkeys", "~{a}*", "~a")
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert lease.remaining() > 25
        assert await admin.pttl("a") > 25_000
        await rule(admin, *ALLOWED)
        await lease.release()


async def test_a_lock_of_several_that_is_refused_for_one_is_renewed_as_before(limited: Client, admin: Client) -> None:
    """With its own ttl, and not with the rest of it, which the undoing asks for; and until its own max_hold."""
    async with Coordinator(limited) as sync:
        lease = await AsyncMultiLock(sync, ["a", "b"], max_hold=60).acquire()
        end = now() + 60
        await asyncio.sleep(7)
        await rule(admin, "resetkeys", "~{a}*", "~a")
        with pytest.raises(CommandRefused):
            await lease.extend(300)
        assert 20 < lease.remaining() < 25
        await rule(admin, *ALLOWED)
        await wait_until(lambda: lease.remaining() > 25, FAST, timeout=20)
        await asyncio.sleep(end - 10 - now())
        for name in "ab":
            assert 5000 < await admin.pttl(name) < 12_000
        await lease.release()


@kinds
async def test_the_latest_answer_counts_when_one_of_several_is_refused(server: EmbeddedServer, kind: Primitive) -> None:
    """Three extensions at the same time; the second is refused: it lasts as the others say."""
    async with wired(server, kind=kind) as w:
        lease = await w.lock(ttl=300, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.answer_error("ERR not now"), skip=1)
        extensions = [asyncio.create_task(lease.extend(ttl)) for ttl in (200, 1, 100)]
        await asyncio.sleep(0)
        assert lease.remaining() <= 1
        outcomes = await asyncio.gather(*extensions, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), CommandRefused, type(None)]
        assert 99 < lease.remaining() <= 100
        # One of the three ttls: a stall of the machine may make a key too young, by no more than it lasts.
        assert 50_000 < await kind.left_ms(w.direct, w.name) < 150_000
        await lease.release()


@kinds
async def test_a_refusal_does_not_restore_what_another_one_may_have_cut(
    server: EmbeddedServer, kind: Primitive
) -> None:
    """P1: the first one has no answer, so the server may have executed it; the second is refused."""
    async with wired(server, kind=kind) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        silent = True
        w.proxy.on(lambda args: silent and RENEW(args), Action.SWALLOW_REPLY, times=None)
        with pytest.raises(Unreachable):
            await lease.extend(20)
        silent, left = False, lease.remaining()
        assert left < 20
        await w.lock().statistics()  # there is a connection again
        w.proxy.on(RENEW, Action.answer_error("ERR not now"))
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert left - 5 < lease.remaining() <= left
        await lease.release()


# -- not now, time and again -----------------------------------------------------------------------------------


@asynccontextmanager
async def without_replicas(admin: Client) -> AsyncIterator[None]:
    await admin.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        await admin.config_set("min-replicas-to-write", 0)


@asynccontextmanager
async def read_only(admin: Client) -> AsyncIterator[None]:
    await admin.execute_command("REPLICAOF", "127.0.0.1", 1)
    try:
        yield
    finally:
        await admin.execute_command("REPLICAOF", "NO", "ONE")


REFUSALS: dict[str, Callable[[Client], AbstractAsyncContextManager[None]]] = {
    "NOREPLICAS": without_replicas,
    "READONLY": read_only,
}


@asynccontextmanager
async def coordinated(own: EmbeddedServer, **options: Any) -> AsyncIterator[Coordinator]:
    async with own.client() as client, Coordinator(client, **options) as sync:
        yield sync


@primitives
@pytest.mark.parametrize("code", REFUSALS)
@pushes
async def test_renewals_that_are_refused_until_the_end(
    own: EmbeddedServer, admin: Client, told: Told, push: Push, code: str, primitive: Primitive
) -> None:
    """The server answered, so it was not unreachable; and this process was not late: it asked, time and again."""
    events: list[Event] = []
    async with coordinated(own, push=push) as sync, AsyncExitStack() as stack:
        # The stack is outside of the body, which may be cancelled once for each of two leases.
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            stack.enter_context(observe_all(events.append))
            async with primitive.make(sync, NAME, ttl=20):  # a replica's keys age in real time
                await stack.enter_async_context(REFUSALS[code](admin))
                await for_ever()
    error = caught.value
    assert (error.reason, error.time_is_up, error.stalled) == ("expired", True, 0.0)
    assert "Redis refused to renew it (then the log says why: renewal_refused)" in str(error)
    lines = told("renewal_refused")
    assert {line.error.code for line in lines} == {code}
    assert all(line.left > 0 for line in lines), "said while there was time to do something about it"
    assert {record.reason for record in told("lease_lost")} == {"expired"}
    assert {(event.reason, event.time_is_up) for event in events if isinstance(event, Lost)} == {("expired", True)}


@pushes
async def test_one_line_for_each_renewal_that_is_refused_for_long(
    own: EmbeddedServer, admin: Client, told: Told, push: Push
) -> None:
    """Not one for each attempt, of which there are several in a second; and none once the server takes writes again."""

    async with coordinated(own, push=push) as sync, AsyncLock(sync, NAME, ttl=6) as lease:
        for _ in range(2):
            before = len(told("renewal_refused"))
            async with without_replicas(admin):
                await wait_until(lambda: len(told("renewal_refused")) > before, FAST, timeout=20)  # noqa: B023
                made, left = await calls(admin, "evalsha"), lease.remaining()
                await wait_until(lambda: lease.remaining() < left - 1, FAST, timeout=20)  # noqa: B023
                assert await calls(admin, "evalsha") >= made + 2
            await wait_until(lambda: lease.remaining() > 5, FAST, timeout=20)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"] * 2
    assert all(2 < line.left < 4 for line in told("renewal_refused"))
    assert not told("lease_lost")


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_a_refusal_that_is_soon_over_leaves_no_line(server: EmbeddedServer, told: Told, mode: str) -> None:
    """A slot that moves, or a failover: the next attempt succeeds, and there is nothing to do about it."""
    async with wired(server, mode=mode) as w, w.lock(ttl=3) as lease:
        refused = w.proxy.on(RENEW, Action.answer_error("TRYAGAIN the slot moves"), times=2)
        await wait_until(lambda: refused.acted == 2, FAST, timeout=20)
        await wait_until(lambda: lease.remaining() > 2.5, FAST, timeout=20)
    assert not told("renewal_refused")


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_a_server_that_refuses_and_is_then_unreachable(
    own: EmbeddedServer, admin: Client, told: Told, mode: str
) -> None:
    """The last that is known counts: whether it would still refuse is not."""
    async with wired(own, mode) as w:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with w.lock(ttl=6), without_replicas(admin):
                await wait_until(lambda: told("renewal_refused"), FAST, timeout=20)
                w.proxy.black_hole = True
                await for_ever()
        w.proxy.black_hole = False
    assert (caught.value.reason, caught.value.time_is_up) == ("unreachable", True)


@pushes
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_loop_that_is_blocked_around_refusals(
    own: EmbeddedServer, admin: Client, told: Told, push: Push, when: str
) -> None:
    """Before them: it asked in time, and was refused. After them, until the end: the outcome is not known."""
    async with coordinated(own, push=push) as sync:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with AsyncLock(sync, NAME, ttl=3) as lease, without_replicas(admin):
                if when == "after":
                    await wait_until(lambda: told("renewal_refused"), FAST, timeout=20)
                stall(1 if when == "before" else lease.remaining() + 0.1)
                await for_ever()
    error = caught.value
    assert (error.reason, error.stalled > 0) == (("expired", False) if when == "before" else ("late", True))


async def test_a_claim_whose_renewal_is_refused(own: EmbeddedServer, admin: Client, told: Told) -> None:
    """The message names the claim, and does not say that this process was late."""
    async with coordinated(own) as sync, coordinated(own, claim=2) as other:
        holder = await AsyncLock(sync, NAME).acquire()
        waiting = asyncio.create_task(AsyncLock(other, NAME).acquire())
        await wait_until(waits(AsyncLock(sync, NAME)), FAST, timeout=20)
        await holder.release()
        lease = await waiting
        async with without_replicas(admin):
            await lease.wait_lost()
        with pytest.raises(LeaseLost, match=r"Redis refused to renew it .*renewal_refused.* claim of 2 seconds") as it:
            lease.check()
    assert (it.value.reason, it.value.time_is_up, it.value.claim) == ("expired", True, 2.0)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]


async def test_a_renewal_behind_a_request_that_is_refused(own: EmbeddedServer, admin: Client, told: Told) -> None:
    """Commands about one name keep their order, so it is not even sent: what is known is why."""
    async with coordinated(own, push="never") as sync:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with AsyncLock(sync, NAME, ttl=3), without_replicas(admin):
                waiting = asyncio.create_task(AsyncLock(sync, NAME).acquire())
                try:
                    await for_ever()
                finally:
                    waiting.cancel()
    assert (caught.value.reason, caught.value.time_is_up) == ("expired", True)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]


async def test_an_extension_that_is_refused_until_the_end(own: EmbeddedServer, admin: Client, told: Told) -> None:
    """The caller gets the error of the server; the lease ends when its time is up."""
    async with coordinated(own) as sync:
        lease = await AsyncLock(sync, NAME, ttl=2).acquire()
        async with without_replicas(admin):
            with pytest.raises((CommandRefused, LeaseLost)):
                await lease.extend(20)
            await lease.wait_lost()
        with pytest.raises(LeaseLost) as caught:
            lease.check()
    assert caught.value.reason == "expired"
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]


# -- claims ----------------------------------------------------------------------------------------------------


async def handed_over(holders: list[BaseLease], waiter: Coordinator, tasks: list[asyncio.Task[BaseLease]]) -> None:
    """Release what is held, once all of them wait; return when every task has its lease."""

    def in_queue() -> bool:
        return sum(ticket._queued for ticket in hub_of(waiter).acquisitions.values()) >= len(tasks)

    await wait_until(in_queue, FAST, timeout=20)
    await asyncio.gather(*(holder.release() for holder in holders))
    await asyncio.wait_for(asyncio.gather(*tasks), 20)


async def one_handed_over(holder: BaseLease, waiter: Coordinator, acquiring: Any) -> BaseLease:
    waiting: asyncio.Task[BaseLease] = asyncio.create_task(acquiring)
    await handed_over([holder], waiter, [waiting])
    return waiting.result()


@pytest.mark.parametrize("wait", [0.0, 0.6], ids=["immediately", "before the first renewal"])
async def test_a_stall_of_seconds_after_a_hand_over_costs_no_lease(
    sync: Coordinator, make_client: MakeClient, wait: float
) -> None:
    """By default, for every primitive: 4 seconds right then, 3 at any time before the first renewal."""
    async with Coordinator(make_client()) as other:
        both = [*((it, it) for it in ALONE), (WRITER, READERS)]
        holders = [await has.make(sync, str(gets)).acquire() for has, gets in both]
        tasks = [asyncio.create_task(gets.make(other, str(gets)).acquire()) for _, gets in both]
        await handed_over(holders, other, tasks)
        leases = [task.result() for task in tasks]
        if wait:
            await asyncio.sleep(wait)
        stall(3 if wait else 4)
        await wait_until(lambda: all(lease.remaining() > 20 for lease in leases), FAST, timeout=15)
        for lease in leases:
            lease.check()
            await lease.release()


@pytest.mark.parametrize("kind", KINDS + WATCHED + SHARED, ids=str)
async def test_an_error_names_the_claim_if_that_was_too_short(
    sync: Coordinator, make_client: MakeClient, kind: Primitive
) -> None:
    """P6: with a ttl of 30 seconds the body is blocked for longer than its claim."""
    async with Coordinator(make_client(), claim=0.3) as other:
        found: list[LeaseLost] = []
        lease = await one_handed_over(
            await kind.make(sync, NAME).acquire(), other, kind.make(other, NAME, ttl=30).acquire()
        )
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with lease:
                stall(0.5)
                with pytest.raises(LeaseLost) as immediately:
                    lease.check()
                found.append(immediately.value)
                await for_ever()
        for error in (*found, caught.value):
            assert 0.25 < error.claim <= 0.3
            assert HINT in str(error)
            assert "0.3 seconds" in str(error)
            assert "give it a longer ttl" not in str(error)
        assert found[0].stalled >= 0.2 or caught.value.stalled >= 0.2


async def test_an_error_names_the_claim_if_redis_was_silent(server: EmbeddedServer) -> None:
    """P6: the server does not answer right after a hand-over, for longer than the claim."""
    async with wired(server, claim=0.5) as w:
        lease = await one_handed_over(await w.elsewhere().acquire(), w.sync, w.lock().acquire())
        w.proxy.black_hole = True
        await asyncio.wait_for(lease.wait_lost(), 10)
        w.proxy.black_hole = False
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        assert caught.value.reason == "unreachable"
        assert HINT in str(caught.value)
        assert "check the server and the network" in str(caught.value)
        assert "blocking" not in str(caught.value), "this process was not blocked"


@pytest.mark.parametrize("handed", [True, False], ids=["renewed since", "not handed over"])
async def test_an_error_does_not_name_the_claim_if_that_was_long_enough(
    sync: Coordinator, make_client: MakeClient, handed: bool
) -> None:
    """After the first renewal it is the ttl that was too short."""
    async with Coordinator(make_client(), claim=0.3) as other:
        lock = AsyncLock(other, NAME, ttl=1.5)
        if handed:
            lease = await one_handed_over(await AsyncLock(sync, NAME).acquire(), other, lock.acquire())
            await wait_until(lambda: lease.remaining() > 1, FAST, timeout=15)
        else:
            lease = await lock.acquire()
        stall(1.6)
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        assert caught.value.claim == 0
        assert HINT not in str(caught.value)


async def test_a_late_renewal_of_a_claim_says_so(
    sync: Coordinator, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning about a stall that cost no lease names what to raise."""
    async with Coordinator(make_client(), claim=2) as other:
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            holder = await AsyncLock(sync, NAME).acquire()
            lease = await one_handed_over(holder, other, AsyncLock(other, NAME).acquire())
            stall(1.3)
            await wait_until(lambda: lease.remaining() > 20, FAST, timeout=15)
        messages = [record.getMessage() for record in caplog.records if repr(NAME) in record.getMessage()]
        assert len(messages) == 1
        assert HINT in messages[0]
        await lease.release()


async def test_a_hand_over_of_a_short_section_costs_no_renewal(sync: Coordinator, make_client: MakeClient) -> None:
    """P9: the first renewal comes after a part of the claim, and not with the grant."""
    client = make_client()
    async with Coordinator(client) as other:
        locks = [AsyncLock(sync, NAME), AsyncLock(other, NAME)]
        for lock in locks:
            await (await lock.acquire()).release()

        async def take_turns(lock: AsyncLock) -> None:
            for _ in range(100):
                async with lock:
                    pass

        await client.config_resetstat()
        await asyncio.gather(*map(take_turns, locks))
        commands = await calls(client, "evalsha")
        assert commands <= 2 * 200 + 10
