"""P10, FAULTS D16: without scripts. Locks and permits with WATCH where those are refused, next to those that use them.

That the engine does all that scripts do is shown where scripts are tested: the conformance suite runs on both, and so
do random histories (tests/simulation) and the faults of the wire (faults/test_wire.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import OutOfMemory, PermissionDenied
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.inside import (
    permit_keys,
)
from ..support.inspecting import calls
from ..support.rights import CHANNELS, KEYS, LOCKS, PAGE, PERMITS_TOO, every_permit
from ..support.served import ORDERS, everything, modes, say, served, served_to, user
from ..support.wired import SOON
from ..support.wired import quiet_loop as quiet_loop

WATCHING = "+watch +unwatch +multi +exec +zmscore +pubsub|numsub"
"""What WATCH needs besides what the scripts use."""
LEAST = f"resetkeys {KEYS} {CHANNELS} -@all +subscribe +publish {LOCKS} {PERMITS_TOO} {WATCHING}"


@modes
@pytest.mark.parametrize("refused", ["-@scripting", LEAST], ids=["no scripts", "least rights"])
async def test_scripts_refused(mode: str, refused: str, caplog: pytest.LogCaptureFixture) -> None:
    """D16: everything works with WATCH, and one line of the log says so."""
    async with served_to("resetkeys ~* resetchannels &* +@all", refused, mode=mode) as s:
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            await everything(s.sync)
            await every_permit(s.admin, s.sync, scripts=False)
            async with AsyncMultiLock(s.sync, [f"{ORDERS}:1", f"{ORDERS}:2"]):
                pass
            reentrant = AsyncReentrantLock(s.sync, ORDERS)
            async with reentrant, reentrant:
                pass
        said, *others = caplog.records
        assert {getattr(record, "event", "") for record in others} <= {"lease_lost"}  # whose keys were deleted
        assert "WATCH" in said.getMessage()
        assert "evalsha" in said.getMessage()


@modes
async def test_only_evalsha_refused(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """D16: each script is sent in full; nothing needs WATCH, and what needs scripts works."""
    async with served_to("resetkeys ~* resetchannels &* +@all", "-evalsha -watch -multi", mode=mode) as s:
        await everything(s.sync)
        await every_permit(s.admin, s.sync)
        async with AsyncLock(s.sync, ORDERS, engine="lua"):
            pass
        assert not [record for record in caplog.records if getattr(record, "event", "") == "watch_instead"]


@pytest.mark.parametrize("missing", ["multi", "watch"])
@modes
async def test_the_first_refusal_is_named(mode: str, missing: str) -> None:
    """P12: without scripts and without WATCH, the error names both, scripts first."""
    words = rf"'evalsha'.*; without scripts it answered NOPERM .*'{missing}'"
    async with served_to("resetkeys ~* resetchannels &* +@all", f"-@scripting -{missing}", mode=mode) as s:
        for _ in range(2):
            with pytest.raises(PermissionDenied, match=words):
                await s.sync.lock(ORDERS).acquire(timeout=60)


@pytest.mark.parametrize("refused", ["-evalsha", "-@scripting"])
async def test_a_new_request_does_not_overtake_a_refused_one(
    server: EmbeddedServer, redis: Redis, refused: str
) -> None:
    """P2: the refusal of the first request is known, and that of the second one is not."""
    await say(redis, "ACL SETUSER someone reset on >secret ~* &* +@all", refused)
    async with (
        FaultProxy(server) as proxy,
        proxy.client(username="someone", password="secret") as client,
        Coordinator(client) as sync,
        asyncio.TaskGroup() as group,
    ):
        order: list[int] = []

        async def turn(number: int) -> None:
            async with sync.lock(ORDERS).acquire(timeout=60):
                order.append(number)

        rule = proxy.on("EVALSHA", Action.HOLD_REPLY, skip=1)
        tasks = [group.create_task(turn(number)) for number in (1, 2)]
        # The handshake sends an EVAL, too; the next one is that of the first request.
        await proxy.until(lambda: proxy.commands["EVAL"] >= 2 and rule.fired.is_set())
        tasks.append(group.create_task(turn(3)))
        await asyncio.sleep(0)  # it is sent, if it is sent immediately
        rule.release.set()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3]
    await say(redis, "ACL DELUSER someone")


def read_write(sync: Coordinator, engine: Any) -> AsyncReadWriteLock:
    return sync.read_write_lock(ORDERS, engine=engine)


BY_SCRIPTS: dict[str, tuple[str, Callable[[Coordinator, Any], Any], Callable[[Any], Awaitable[object]]]] = {
    "readers": ("a read/write lock", read_write, lambda it: it.read().acquire()),
    "writer": ("a read/write lock", read_write, lambda it: it.write().acquire()),
    "event": ("an event", lambda it, engine: it.event(ORDERS, engine=engine), lambda it: it.set()),
    "latch": ("a latch", lambda it, engine: it.latch(ORDERS, 2, engine=engine), lambda it: it.wait()),
    "barrier": ("a barrier", lambda it, engine: it.barrier(ORDERS, 2, engine=engine), lambda it: it.wait()),
}


@modes
@pytest.mark.parametrize("which", BY_SCRIPTS)
async def test_what_needs_scripts_says_so(mode: str, which: str) -> None:
    """The error names the primitive and what to allow; the second call finds the same, and locks still work."""
    what, make, use = BY_SCRIPTS[which]
    async with served_to("resetkeys ~* resetchannels &* +@all", "-@scripting", mode=mode) as s:
        for _ in range(2):
            with pytest.raises(PermissionDenied, match=f"{what} needs scripts, .*: allow this user EVAL and EVALSHA"):
                await asyncio.wait_for(use(make(s.sync, "auto")), 30)
        with pytest.raises(ValueError, match=f'{what} needs scripts: engine must be "lua" or "auto", not "watch"'):
            make(s.sync, "watch")
        token = await (await s.sync.lock("d").acquire()).detach()
        with pytest.raises(PermissionDenied, match=r"attach\(\) needs scripts"):
            await s.sync.lock("d").attach(token)
        await everything(s.sync)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_the_documentation_tells_the_rights() -> None:
    assert WATCHING in " ".join(PAGE.read_text().split())


@modes
async def test_a_server_without_scripts(mode: str) -> None:
    """P10: EVAL and EVALSHA do not exist there."""
    async with served(mode, args=("--rename-command", "EVALSHA", "", "--rename-command", "EVAL", "")) as s:
        await everything(s.sync)
        await every_permit(s.admin, s.sync, scripts=False)


@modes
async def test_scripts_wanted_and_refused(mode: str) -> None:
    """P12: engine="lua" does not go another way."""
    async with served_to("resetkeys ~* resetchannels &* +@all", "-@scripting", mode=mode) as s:
        with pytest.raises(PermissionDenied, match="evalsha"):
            await AsyncLock(s.sync, ORDERS, engine="lua").acquire()
        async with AsyncLock(s.sync, ORDERS):  # another one uses WATCH now
            pass
        with pytest.raises(PermissionDenied, match="evalsha"):
            await AsyncLock(s.sync, ORDERS, engine="lua").acquire()


@modes
async def test_the_right_is_taken_away(mode: str) -> None:
    """D16: while it is held and waited for: the lease is renewed, and handed over, all the same."""
    async with served_to("resetkeys ~* resetchannels &* +@all", mode=mode) as s:
        lock = AsyncLock(s.sync, ORDERS)
        lease = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire(timeout=60))
        await wait_until(lambda: _waits(lock), SOON, timeout=5)
        await user(s, "-@scripting")
        left = lease.remaining() - 1
        await wait_until(lambda: lease.remaining() < left, SOON, timeout=60)
        await wait_until(lambda: lease.remaining() > left or lease.lost, SOON, timeout=60)
        lease.check()
        await lease.release()
        following = await waiting
        assert following.fence > lease.fence
        await following.release()


async def _waits(lock: AsyncLock) -> bool:
    return (await lock.statistics()).waiting > 0


@modes
async def test_out_of_memory_while_more_than_a_thousand_permits_are_over(mode: str) -> None:
    """D10: an error for each request, on a connection that goes on."""
    async with served(mode, client={"socket_timeout": 30}, response_timeout=30) as s:
        semaphore = AsyncSemaphore(s.sync, ORDERS, limit=5000, engine="watch")
        held = await semaphore.acquire()
        permits, state = permit_keys(ORDERS.encode(), "sem").by("watch").all[:2]
        dead = [b"dead%d" % number for number in range(1500)]
        await s.admin.zadd(permits, dict.fromkeys(dead, 1))
        await s.admin.hset(state, mapping={"used": 1501, **{(b"=" + token).decode(): "1 1" for token in dead}})
        connections = await s.ours()
        await s.admin.config_set("maxmemory", 1)
        for _ in range(2):
            with pytest.raises(OutOfMemory, match=ORDERS):
                await semaphore.acquire(timeout=30)
        await s.admin.config_set("maxmemory", 0)
        if mode == "link":
            assert await s.ours() == connections
        async with semaphore.acquire(weight=4999):
            pass
        await held.release()


@pytest.mark.parametrize("turns", range(8))
@modes
async def test_cancelled_while_scripts_turn_out_to_be_refused(mode: str, turns: int) -> None:
    """P5: what undoes a request stays behind it, also when both go another way than they were sent."""
    async with served_to("resetkeys ~* resetchannels &* +@all", "-@scripting", mode=mode) as s:
        for engine in ("auto", "watch"):
            task = asyncio.create_task(AsyncLock(s.sync, ORDERS, engine=engine).acquire())
            for _ in range(turns * 3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():  # it was granted before that
                await task.result().release()
        other = AsyncLock(s.sync, ORDERS)
        async with asyncio.timeout(2):
            await (await other.acquire()).release()
        await wait_until(lambda: _is_free(s.admin), SOON, timeout=5)


async def _is_free(admin: Redis) -> bool:
    return not await admin.exists(ORDERS, f"{{{ORDERS}}}:queue", f"{{{ORDERS}}}:polls")


Make = Callable[[Coordinator, Any], AsyncLock | AsyncSemaphore]
SHARED: dict[str, tuple[Make, int]] = {
    "lock": (lambda sync, engine: AsyncLock(sync, "both", engine=engine), 1),
    "semaphore(3)": (lambda sync, engine: AsyncSemaphore(sync, "both", limit=3, engine=engine), 3),
}


@pytest.mark.parametrize(("make", "limit"), SHARED.values(), ids=SHARED)
async def test_both_engines_work_on_one_name_together(
    redis: Redis, server: EmbeddedServer, make: Make, limit: int
) -> None:
    """P1, P2, P8: 2 x 12 tasks on 3 coordinators, half of them with WATCH: never too many, order, rising fences."""
    await redis.flushall()
    inside, most, fences, order = 0, 0, list[int](), list[int]()

    async def use(one: AsyncLock | AsyncSemaphore, number: int) -> None:
        nonlocal inside, most
        lease: Lease = await one.acquire(timeout=20)
        order.append(number)
        fences.append(lease.fence)
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        await lease.release()

    async with server.client() as b, server.client() as c:
        clients: list[tuple[Redis, Any]] = [(redis, {}), (b, {}), (c, {"push": "never"})]
        syncs = [Coordinator(client, **options) for client, options in clients]
        everybody = [make(sync, engine) for sync in syncs for engine in ("lua", "watch")]
        first = [await one.acquire() for one in everybody[:limit]]
        tasks: list[asyncio.Task[None]] = []
        for number in range(24):
            one = everybody[number % len(everybody)]
            tasks.append(asyncio.create_task(use(one, number)))
            await wait_until(lambda: _queued(everybody[0], len(tasks)), SOON, timeout=5)
        for lease in first:
            await lease.release()
        await asyncio.gather(*tasks)
        assert most <= limit
        if limit == 1:
            assert order == list(range(24)), "P2"
            assert fences == sorted(set(fences)), "P8"
        assert len(set(fences)) == 24
        for sync in syncs:
            await sync.aclose()


async def _queued(one: AsyncLock | AsyncSemaphore, number: int) -> bool:
    return (await one.statistics()).waiting >= number


MAKE: dict[str, Callable[..., object]] = {
    "lock": AsyncLock,
    "reentrant": AsyncReentrantLock,
    "readers and writers": AsyncReadWriteLock,
    "semaphore": lambda client, name, **options: AsyncSemaphore(client, name, limit=1, **options),
    "multi": lambda client, name, **options: AsyncMultiLock(client, [name], **options),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("engine", ["Lua", "", None, True])
def test_no_such_engine(redis: Redis, make: Callable[..., object], engine: Any) -> None:
    """E2: bad input fails at the call."""
    with pytest.raises(ValueError, match="engine must be 'auto', 'lua' or 'watch'"):
        make(redis, "name", engine=engine)


@modes
async def test_cost(redis: Redis, mode: str) -> None:
    """P9, for this engine: an acquire and a release are one transaction each, and waiting is none."""
    await redis.flushall()
    async with Coordinator(redis, push="never" if mode == "plain" else "always") as sync:
        lock = AsyncLock(sync, "cost", engine="watch")
        await (await lock.acquire()).release()

        async def counted(operation: Awaitable[Any]) -> tuple[Any, int]:
            before = await calls(redis, "exec")
            result = await operation
            return result, await calls(redis, "exec") - before

        lease, execs = await counted(lock.acquire())
        assert execs == 1
        waiting = asyncio.create_task(lock.acquire())
        assert (await counted(wait_until(lambda: _queued(lock, 1), SOON, timeout=5)))[1] >= 1
        if mode == "link":
            assert (await counted(asyncio.sleep(0.05)))[1] == 0
        assert (await counted(lease.release()))[1] >= 1
        assert (await counted((await waiting).release()))[1] == 1
