"""However a client is configured, its locks work alike (E3, A7, C10), also next to locks of other libraries (P11)."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from itertools import product
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    LeaseLost,
    NotHeld,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inside import Call, lock_keys, permit_keys, text, tuned
from ..support.views import holder_of, readers_of, remaining_of, tokens, writer_of

each_push = pytest.mark.parametrize("push", ["always", "never"])
NAME = "caf\u00e9"
BASIC = [
    {"decode_responses": decode, "protocol": protocol, "legacy_responses": legacy, "single_connection_client": single}
    for decode, protocol, legacy, single in product((False, True), (2, 3), (False, True), (False, True))
]
KNOWN = inspect.signature(Redis.__init__).parameters
"""What the installed redis-py takes: some options came after the oldest version we admit."""


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options the installed redis-py takes."""
    return {key: value for key, value in options.items() if key in KNOWN}


MODES: Mapping[str, dict[str, Any]] = {
    **{"-".join(f"{key.split('_')[0]}={value:d}" for key, value in mode.items()): mode for mode in BASIC},
    "latin-1": {"encoding": "latin-1"},
    "latin-1-decoded": {"encoding": "latin-1", "decode_responses": True},
    "errors-ignored": {"encoding_errors": "ignore", "decode_responses": True},
    "db 3": {"db": 3},
    "db 3-single": {"db": 3, "single_connection_client": True},
    "no timeouts": {"socket_timeout": None, "socket_connect_timeout": None},
    "health checks": {"health_check_interval": 1},
    "named": {"client_name": "named"},
    "tiny reads": {"socket_read_size": 1},
    "one connection": {"max_connections": 1},
}
USES = ("explicit", "implicit", "polling")


@pytest_asyncio.fixture(params=MODES)
async def client(request: pytest.FixtureRequest, make_client: MakeClient, redis: Redis) -> Redis:
    """A client of that mode; all databases are empty."""
    return make_client(**known(MODES[request.param]))


@pytest_asyncio.fixture(params=USES)
async def source(request: pytest.FixtureRequest, client: Redis) -> AsyncIterator[Redis | Coordinator]:
    """What the locks are made from: the client itself, or a coordinator."""
    if request.param == "implicit":
        yield client
    else:
        async with Coordinator(client, push="always" if request.param == "explicit" else "never") as coordinator:
            yield coordinator


def encoding_of(client: Redis) -> str:
    return str(client.connection_pool.connection_kwargs.get("encoding", "utf-8"))


def wire_of(client: Redis, text: str) -> bytes:
    """Text as the client encodes keys."""
    return text.encode(encoding_of(client))


async def locks_work(source: Redis | Coordinator, client: Redis, observer: Redis) -> None:
    """Acquire, contend, hand over, look, release, by token and by identity."""
    name, identity = wire_of(client, NAME), wire_of(client, "\u00e9mile")
    lock = AsyncLock(source, NAME, ttl=20)
    lease = await lock.acquire(timeout=5)
    assert await observer.get(name) == lease.token.encode(encoding_of(client))
    assert 15_000 < await observer.pttl(name) <= 20_100
    assert await lock.try_acquire() is None

    waiting = []
    for count, who in enumerate(("\u00e9mile", None), 1):
        waiting.append(asyncio.create_task(lock.acquire(timeout=20, identity=who)))
        await wait_until(waits(lock, count), FAST, timeout=15)
    seen = await lock.statistics()
    assert (holder_of(seen), seen.fence, seen.holders[0].foreign, seen.waiting) == (lease.token, lease.fence, False, 2)
    assert 15 < (remaining_of(seen) or 0) <= 20.1
    assert set(await observer.keys()) <= set(lock_keys(name).all)

    await lease.release()
    async with asyncio.timeout(5):
        named = await waiting[0]
    assert named.fence > lease.fence
    assert await observer.get(name) == identity
    with pytest.raises(NotHeld):
        await lock.release(identity="somebody")
    await lock.release(identity="\u00e9mile")
    async with asyncio.timeout(5):
        last = await waiting[1]
    assert last.fence > named.fence
    await last.extend(15)
    assert 10_000 < await observer.pttl(name) <= 15_100
    await last.release()
    assert not await lock.locked()
    forced = await lock.acquire(timeout=5)
    assert forced.fence > last.fence
    assert await lock.force_release()
    with pytest.raises(LeaseLost, match="gone from the server"):
        await forced.release()
    assert await observer.keys() == [lock_keys(name).fence]


async def permits_work(source: Redis | Coordinator, client: Redis, observer: Redis) -> None:
    """A semaphore and a read/write lock: acquire, contend, hand over, look, downgrade, resize, release by identity."""
    name, identity = wire_of(client, NAME), wire_of(client, "\u00e9mile")
    semaphore, both = AsyncSemaphore(source, NAME, limit=2, ttl=20), AsyncReadWriteLock(source, NAME, ttl=20)
    sem, rw = permit_keys(name, "sem"), permit_keys(name, "rw")
    lease = await semaphore.acquire(weight=2, timeout=5)
    assert await observer.zrange(sem.all[0], 0, -1) == [lease.token.encode(encoding_of(client))]
    assert await semaphore.try_acquire() is None
    waiting = asyncio.create_task(semaphore.acquire(timeout=20, identity="\u00e9mile"))
    await wait_until(waits(semaphore), FAST, timeout=15)
    seen = await semaphore.statistics()
    assert (seen.limit, seen.held, seen.available, seen.waiting) == (2, 2, 0, 1)
    assert tokens(seen.waiters) == (text(identity),)
    assert [(holder.token, holder.weight, holder.fence) for holder in seen.holders] == [(lease.token, 2, lease.fence)]
    await lease.release()
    async with asyncio.timeout(5):
        named = await waiting
    assert named.fence > lease.fence
    assert identity in await observer.zrange(sem.all[0], 0, -1)
    await semaphore.resize(1)
    assert await semaphore.get_limit() == 1
    with pytest.raises(NotHeld):
        await semaphore.release(identity="somebody")
    await semaphore.release(identity="\u00e9mile")

    reader, other = await both.read().acquire(timeout=5), await both.read().acquire(timeout=5)
    writing = asyncio.create_task(both.write().acquire(timeout=20))
    await wait_until(waits(both), FAST, timeout=15)
    await other.release()
    seen_too = await both.statistics()
    assert (writer_of(seen_too), readers_of(seen_too), seen_too.waiting) == (None, 1, 1)
    await reader.release()
    async with asyncio.timeout(5):
        later = await writing
    assert later.fence > reader.fence
    await both.downgrade(later)
    assert tokens((await both.statistics()).holders) == (later.token,)
    await later.release()
    assert not await both.locked()
    assert not await semaphore.locked()
    assert set(await observer.keys()) <= {*sem.all, *rw.all}


WORK: dict[str, Callable[[Any, Redis, Redis], Any]] = {"locks": locks_work, "permits": permits_work}


@pytest.mark.parametrize("work", WORK)
async def test_e3_every_mode_works_alike(
    source: Redis | Coordinator, client: Redis, make_client: MakeClient, work: str
) -> None:
    observer = make_client(db=client.connection_pool.connection_kwargs.get("db", 0))
    await WORK[work](source, client, observer)


@each_push
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
        await locks_work(coordinator, client, redis)


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
        for mode, push in product(modes, ("always", "never")):
            coordinator = tuned(make_client(**mode), push=push, poll=FAST)
            locks.append((await stack.enter_async_context(coordinator)).lock("x"))
        async with asyncio.timeout(60):
            await asyncio.gather(*map(work, locks))


# -- pools (A7, C10) ---------------------------------------------------------------------------------------


async def connections(observer: Redis, name: str) -> int:
    return sum(client["name"] == name for client in await observer.client_list())


@pytest.mark.real
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "implicit"])
async def test_a7_renewals_do_not_wait_for_a_pool_that_the_user_blocks(
    redis: Redis, make_client: MakeClient, explicit: bool
) -> None:
    client: Any = make_client(max_connections=1, socket_timeout=None)
    lock = AsyncLock(Coordinator(client) if explicit else client, "x", ttl=3)
    blocked = asyncio.ensure_future(client.blpop(["list"], timeout=60))

    async def is_blocked() -> bool:
        return bool((await redis.info("clients"))["blocked_clients"])

    await wait_until(is_blocked, FAST, timeout=15)
    async with lock as lease:
        await wait_until(lambda: lease.remaining() < 2.2, FAST, timeout=15)
        await wait_until(lambda: lease.remaining() > 2.2 or lease.lost, FAST, timeout=15)
        assert await redis.get("x") == lease.token.encode()
        other = asyncio.create_task(lock.acquire(timeout=15))
        await wait_until(waits(lock), FAST, timeout=15)
    await (await other).release()
    assert not blocked.done()
    plain: Any = redis
    await plain.rpush("list", "done")
    async with asyncio.timeout(15):
        await blocked


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


@each_push
async def test_nothing_stays_of_a_call_that_was_answered(redis: Redis, push: Any) -> None:
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


async def delete_if(redis: Any, token: str) -> int:
    return int(await redis.eval(COMPARE_AND_DELETE, 1, "x", token))


@each_push
async def test_p11_a_foreign_lock_keeps_us_out_until_it_ends(redis: Redis, push: Any) -> None:
    """It is deleted, or its ttl has passed."""
    async with Coordinator(redis, push=push) as sync:
        await redis.set("y", "theirs", px=6_000)
        async with asyncio.timeout(30), sync.lock("y") as other:
            assert await redis.get("y") == other.token.encode()
        lock = sync.lock("x")
        assert await redis.set("x", "theirs", nx=True, px=60_000)
        assert await lock.try_acquire() is None
        waiting = asyncio.create_task(lock.acquire(timeout=20))
        await wait_until(waits(lock), FAST, timeout=15)
        seen = await lock.statistics()
        assert (holder_of(seen), seen.holders[0].foreign, bool(seen.held)) == ("theirs", True, True)
        assert 50 < (remaining_of(seen) or 0) <= 60.1
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
