"""However a client is configured, its locks work alike (E3, A7, C10), also next to locks of other libraries (P11)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import product
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.lock import Lock as RedisLock

from redis_sync_aio import AcquireTimeout, AsyncLock, AsyncSemaphore, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.connecting import NAME, known, wire_of
from ..support.connecting import client as client
from ..support.connecting import source as source
from ..support.inside import Call, lock_keys, tuned
from ..support.views import holder_of, remaining_of

PUSHES: tuple[Push, ...] = ("always", "never")


async def works(source: Redis | Coordinator, client: Redis, observer: Redis) -> None:
    """Acquire, contend, hand over, look, release, by token and by identity."""
    name, identity = wire_of(client, NAME), wire_of(client, "\u00e9mile")
    lock = AsyncLock(source, NAME, ttl=20)
    lease = await lock.acquire(timeout=5)
    assert await observer.get(name) == lease._grant.wire_token
    assert 15_000 < await observer.pttl(name) <= 20_000
    assert await lock.try_acquire() is None

    waiting = []
    for count, who in enumerate(("\u00e9mile", None), 1):
        waiting.append(asyncio.create_task(lock.acquire(timeout=20, identity=who)))
        await wait_until(waits(lock, count), FAST, timeout=15)
    seen = await lock.statistics()
    assert (holder_of(seen), seen.fence, seen.holders[0].foreign, seen.waiting) == (lease.token, lease.fence, False, 2)
    assert 15 < (remaining_of(seen) or 0) <= 20
    assert set(await observer.keys()) <= set(lock_keys(name).all)

    await lease.release()
    async with asyncio.timeout(5):
        named = await waiting[0]
    assert named.fence > lease.fence
    assert await observer.get(name) == named._grant.wire_token == identity
    with pytest.raises(NotHeld):
        await lock.release(identity="somebody")
    await lock.release(identity="\u00e9mile")
    async with asyncio.timeout(5):
        last = await waiting[1]
    assert last.fence > named.fence
    await last.extend(15)
    assert 10_000 < await observer.pttl(name) <= 15_000
    await last.release()
    assert not await lock.locked()
    forced = await lock.acquire(timeout=5)
    assert forced.fence > last.fence
    assert await lock.force_release()
    with pytest.raises(LeaseLost, match="gone from the server"):
        await forced.release()
    assert await observer.keys() == [lock_keys(name).fence]


async def test_e3_every_mode_works_alike(source: Redis | Coordinator, client: Redis, make_client: MakeClient) -> None:
    observer = make_client(db=client.connection_pool.connection_kwargs.get("db", 0))
    await works(source, client, observer)


@pytest.mark.parametrize("push", ["always", "never"])
@pytest.mark.parametrize("way", ["tcp", "unix", "url", "own pool", "blocking pool"])
async def test_e3_every_way_to_connect_works_alike(
    server: EmbeddedServer, redis: Redis, make_client: MakeClient, way: str, push: Any
) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    made: Mapping[str, Any] = {
        "tcp": lambda: Redis(host="localhost", port=server.port or 0),
        "unix": lambda: Redis(unix_socket_path=server.unix_socket),
        "url": lambda: Redis.from_url(f"unix://{server.unix_socket}?db=0&decode_responses=True"),
        "own pool": lambda: Redis.from_pool(ConnectionPool.from_url(url)),
        "blocking pool": lambda: Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=1)),
    }
    async with made[way]() as client, Coordinator(client, push=push) as coordinator:
        await works(coordinator, client, redis)


@pytest.mark.timing
async def test_clients_of_different_modes_share_a_lock(redis: Redis, make_client: MakeClient) -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"protocol": 2, "decode_responses": True},
        known({"protocol": 3, "legacy_responses": False}),
    ]
    inside: list[AsyncLock] = []

    async def work(lock: AsyncLock) -> None:
        for _ in range(5):
            async with lock:
                inside.append(lock)
                await asyncio.sleep(0)
                assert inside == [lock], "P1"
                inside.pop()

    async with AsyncExitStack() as stack:
        locks: list[AsyncLock] = []
        for mode, push in product(modes, PUSHES):
            coordinator = tuned(make_client(**mode), push=push, poll=FAST)
            locks.append((await stack.enter_async_context(coordinator)).lock("x"))
        async with asyncio.timeout(2):
            await asyncio.gather(*map(work, locks))


def untyped(client: Redis) -> Any:
    """Return the client without its annotations, which differ from version to version of redis-py."""
    return client


# -- pools (A7, C10) ---------------------------------------------------------------------------------------


async def connections(observer: Redis, name: str) -> int:
    return sum(client["name"] == name for client in await observer.client_list())


@pytest.mark.timing
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "implicit"])
@pytest.mark.timing
async def test_a7_renewals_do_not_wait_for_a_pool_that_the_user_blocks(
    redis: Redis, make_client: MakeClient, explicit: bool
) -> None:
    client = make_client(max_connections=1, socket_timeout=None)
    lock = AsyncLock(Coordinator(client) if explicit else client, "x", ttl=0.4)
    blocked = asyncio.ensure_future(untyped(client).blpop(["list"], timeout=30))
    await wait_until(lambda: _blocked(redis), FAST, timeout=15)
    async with lock as lease:
        begun = lease._grant.deadline
        await wait_until(lambda: lease._grant.deadline > begun + 0.8, FAST, timeout=15)
        lease.check()
        assert await redis.get("x") == lease._grant.wire_token
        other = asyncio.create_task(lock.acquire(timeout=5))
        await wait_until(waits(lock), FAST, timeout=15)
    await (await other).release()
    assert not blocked.done()
    await untyped(redis).rpush("list", "go on")
    async with asyncio.timeout(5):
        await blocked


async def _blocked(redis: Redis) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"])


@pytest.mark.parametrize(("push", "most"), [("always", 1), ("never", 2)])
async def test_c10_100_waiters_behind_a_small_pool_are_all_served(
    server: EmbeddedServer, redis: Redis, push: Any, most: int
) -> None:
    pool = BlockingConnectionPool(
        host="127.0.0.1", port=server.port, max_connections=2, timeout=200, client_name="small"
    )
    count = 100
    seen: list[int] = []
    async with Redis.from_pool(pool) as client, tuned(client, push=push, poll=FAST) as sync:
        lock = sync.lock("x")

        async def once(number: int) -> int:
            async with lock:
                if number % 20 == 0:
                    seen.append(await connections(redis, "small"))
                return number

        async with asyncio.timeout(60):
            assert await asyncio.gather(*map(once, range(count))) == list(range(count))
    assert max(seen) <= most, seen


@pytest.mark.parametrize("push", PUSHES)
async def test_nothing_stays_of_a_call_that_was_answered(redis: Redis, push: Push) -> None:
    """Of those that stood in line behind another about the same name neither, whatever time they had."""
    name = "nothing stays"
    async with Coordinator(redis, push=push) as sync:
        for lease in await asyncio.gather(
            *(AsyncSemaphore(sync, name, limit=9).acquire(timeout=600) for _ in range(9))
        ):
            await lease.release()
        await asyncio.sleep(0)  # the turn in which the last one was answered
        gc.collect()
        assert [one for one in gc.get_objects() if isinstance(one, Call) and one.name == name.encode()] == []


async def test_c10_a_client_has_one_connection_more_whatever_it_locks(redis: Redis, make_client: MakeClient) -> None:
    client = make_client(client_name="mine")
    await client.ping()
    assert await connections(redis, "mine") == 1
    async with AsyncExitStack() as stack:
        for number in range(50):
            await stack.enter_async_context(AsyncLock(client, f"lock {number}"))
        waiting = [asyncio.create_task(AsyncLock(client, "lock 0").acquire()) for _ in range(50)]
        await wait_until(waits(AsyncLock(redis, "lock 0"), 50), FAST, timeout=15)
        assert await connections(redis, "mine") == 2
    for task in waiting:
        await (await task).release()
    assert await connections(redis, "mine") == 2


# -- locks of other libraries (P11) --------------------------------------------------------------------------

COMPARE_AND_DELETE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"

each_push = pytest.mark.parametrize("push", ["always", "never"])


async def delete_if(redis: Redis, token: str) -> int:
    return int(await untyped(redis).eval(COMPARE_AND_DELETE, 1, "x", token))


@each_push
async def test_p11_a_foreign_lock_keeps_us_out_until_it_is_deleted(redis: Redis, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        assert await redis.set("x", "theirs", nx=True, px=60_000)
        assert await lock.try_acquire() is None
        waiting = asyncio.create_task(lock.acquire(timeout=20))
        await wait_until(waits(lock), FAST, timeout=15)
        seen = await lock.statistics()
        assert (holder_of(seen), seen.holders[0].foreign, bool(seen.held)) == ("theirs", True, True)
        assert 50 < (remaining_of(seen) or 0) <= 60
        assert await delete_if(redis, "theirs") == 1
        async with asyncio.timeout(9):
            lease = await waiting
        assert not (await lock.statistics()).holders[0].foreign
        await lease.release()


@each_push
async def test_p11_our_lock_keeps_foreign_ones_out_until_it_is_released(redis: Redis, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        async with sync.lock("x") as lease:
            assert not await redis.set("x", "theirs", nx=True, px=60_000)
            assert await delete_if(redis, "theirs") == 0
            lease.check()
        assert await redis.set("x", "theirs", nx=True, px=60_000)
        assert await delete_if(redis, "theirs") == 1
        # Ours in their form: a client that knows the token may end it so.
        lease = await sync.lock("x").acquire()
        assert await delete_if(redis, lease.token) == 1
        with pytest.raises(LeaseLost):
            await lease.release()


@each_push
@pytest.mark.timing
async def test_p11_a_foreign_lock_ends_with_its_ttl(redis: Redis, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        await redis.set("x", "theirs", px=150)
        async with asyncio.timeout(2), sync.lock("x") as lease:
            assert await redis.get("x") == lease._grant.wire_token


@each_push
@pytest.mark.timing
async def test_p11_a_foreign_lock_without_ttl_is_shown_and_never_given_one(redis: Redis, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        await redis.set("x", "theirs")
        waiting = asyncio.create_task(lock.acquire(timeout=20))
        await wait_until(waits(lock), FAST, timeout=15)
        assert await lock.try_acquire() is None
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=0.05)
        with pytest.raises(NotHeld):
            await lock.release()
        with pytest.raises(NotHeld, match=r"by 'theirs'"):
            await lock.release(identity="ours")
        seen = await lock.statistics()
        assert (holder_of(seen), remaining_of(seen), seen.holders[0].foreign) == ("theirs", None, True)
        assert await redis.pttl("x") == -1
        assert await lock.force_release()
        async with asyncio.timeout(9):
            await (await waiting).release()
        assert not await lock.locked()


@each_push
async def test_p11_locks_of_redis_py_and_ours_exclude_each_other(redis: Redis, push: Any) -> None:
    inside: list[str] = []

    async def section(who: str) -> None:
        inside.append(who)
        for _ in range(3):
            await asyncio.sleep(0)
        assert inside == [who], "P1"
        inside.remove(who)

    async def ours(lock: AsyncLock) -> None:
        for _ in range(10):
            async with lock:
                await section("ours")

    async def theirs() -> None:
        for _ in range(10):
            async with RedisLock(redis, "x", timeout=10, sleep=0.001):
                await section("theirs")

    async with tuned(redis, push=push, poll=FAST) as sync, asyncio.timeout(25):
        await asyncio.gather(ours(sync.lock("x")), theirs(), ours(sync.lock("x")), theirs())
