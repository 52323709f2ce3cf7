"""Inputs on a real server (E1, E2, D15): what is bad fails at the call and sends nothing; what is odd works."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import pytest_asyncio
import redis as redis_py
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    NotHeld,
    synchronized,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongKeyType
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import Engine, Push

from ..support.body import FAST, waits
from ..support.inside import lock_keys, permit_keys
from ..support.primitives import KINDS, LOCK, Primitive, each

ways = pytest.mark.parametrize("push", ["auto", "never"])

# -- bad values (E1, E2) -----------------------------------------------------------------------------------

Table = Mapping[str, tuple[Any, type[Exception]]]
BAD_SECONDS: Table = {
    "text": ("5", TypeError),
    "true": (True, TypeError),
    "decimal": (Decimal(5), TypeError),
    "negative": (-1, ValueError),
    "nan": (math.nan, ValueError),
    "inf": (math.inf, ValueError),
    "negative timedelta": (timedelta(seconds=-1), ValueError),
    "huge int": (10**400, ValueError),
}
BAD_PERIOD: Table = {**BAD_SECONDS, "0": (0, ValueError)}
BAD_TTL: Table = {
    **BAD_PERIOD,
    "0.1 ms": (0.0001, ValueError),
    "1e18": (1e18, ValueError),
    "1e306": (1e306, ValueError),
}
BAD_NAME: Table = {
    "empty": ("", ValueError),
    "no bytes": (b"", ValueError),
    "1 MB": ("x" * (1 << 20), ValueError),
    "surrogate": ("\ud800", ValueError),
    "int": (5, TypeError),
    "none": (None, TypeError),
}
BAD_IDENTITY: Table = {"empty": ("", ValueError), "int": (5, TypeError), "surrogate": ("\ud800", ValueError)}
BAD_FLAG: Table = {"1": (1, TypeError), "none": (None, TypeError), "text": ("yes", TypeError)}
BAD_RULE: Table = {"ignore": ("ignore", ValueError), "none": (None, ValueError), "list": ([], ValueError)}
BAD_PUSH: Table = {"sometimes": ("sometimes", ValueError), "none": (None, ValueError), "true": (True, ValueError)}
BAD_LIMIT: Table = {
    "-1": (-1, ValueError),
    "2**31": (2**31, ValueError),
    "10**400": (10**400, ValueError),
    "true": (True, TypeError),
    "1.5": (1.5, TypeError),
    "1.0": (1.0, TypeError),
    "nan": (math.nan, TypeError),
    "text": ("5", TypeError),
    "decimal": (Decimal(5), TypeError),
    "list": ([1], TypeError),
}
BAD_WEIGHT: Table = {
    **BAD_LIMIT,
    "0": (0, ValueError),
    "none": (None, TypeError),
    "above the limit": (6, ValueError),
}
NOT_NONE: Table = {"none": (None, TypeError)}
BAD_TEMPLATE: Table = {
    "empty": ("", ValueError),
    "none": (None, TypeError),
    "int": (5, TypeError),
    "bytes": (b"x", TypeError),
    "unknown": ("user:{nobody}", ValueError),
    "positional": ("user:{0}", ValueError),
    "anonymous": ("user:{}", ValueError),
    "not closed": ("user:{user", ValueError),
    "1 MB": ("x" * (1 << 20), ValueError),
}
OPTIONS: Mapping[str, Table] = {"max_hold": BAD_TTL, "auto_renew": BAD_FLAG, "on_lost": BAD_RULE}


async def _function(user: int) -> None:
    """What `synchronized` decorates here."""


Use = Callable[[Any, Any], object]
"""Uses a client in a wrong way, with a value."""


def semaphore(client: Any, limit: Any = 5, name: Any = "x", **options: Any) -> AsyncSemaphore:
    return AsyncSemaphore(client, name, limit=limit, **options)


def option(make: Callable[..., Any], name: str) -> Use:
    return lambda client, bad: make(client, **{name: bad})


def call(make: Callable[[Any], Any], method: str, name: str) -> Use:
    return lambda client, bad: getattr(make(client), method)(**{name: bad})


def lock(client: Any, name: Any = "x", **options: Any) -> AsyncLock:
    return AsyncLock(client, name, **options)


def decorated(client: Any, name: Any = "x", **options: Any) -> object:
    return synchronized(client, name, **options)(_function)


USES: Mapping[str, tuple[Use, Table]] = {
    "AsyncLock(name)": (option(lock, "name"), BAD_NAME),
    "AsyncLock(ttl)": (option(lock, "ttl"), BAD_TTL),
    **{f"AsyncLock({name})": (option(lock, name), table) for name, table in OPTIONS.items()},
    "lock.acquire(timeout)": (call(lock, "acquire", "timeout"), BAD_SECONDS),
    "lock.acquire(ttl)": (call(lock, "acquire", "ttl"), BAD_TTL),
    "lock.acquire(identity)": (call(lock, "acquire", "identity"), BAD_IDENTITY),
    "lock.try_acquire(ttl)": (call(lock, "try_acquire", "ttl"), BAD_TTL),
    "lock.try_acquire(identity)": (call(lock, "try_acquire", "identity"), BAD_IDENTITY),
    "lock.release(identity)": (call(lock, "release", "identity"), BAD_IDENTITY),
    "AsyncSemaphore(name)": (option(semaphore, "name"), BAD_NAME),
    "AsyncSemaphore(limit)": (option(semaphore, "limit"), BAD_LIMIT),
    "AsyncSemaphore(ttl)": (option(semaphore, "ttl"), {**BAD_TTL, **NOT_NONE}),
    **{f"AsyncSemaphore({name})": (option(semaphore, name), table) for name, table in OPTIONS.items()},
    "semaphore.acquire(weight)": (call(semaphore, "acquire", "weight"), BAD_WEIGHT),
    "semaphore.acquire(timeout)": (call(semaphore, "acquire", "timeout"), BAD_SECONDS),
    "semaphore.acquire(ttl)": (call(semaphore, "acquire", "ttl"), BAD_TTL),
    "semaphore.acquire(identity)": (call(semaphore, "acquire", "identity"), BAD_IDENTITY),
    "semaphore.try_acquire(weight)": (call(semaphore, "try_acquire", "weight"), BAD_WEIGHT),
    "semaphore.resize(limit)": (call(semaphore, "resize", "limit"), {**BAD_LIMIT, **NOT_NONE}),
    "semaphore.release(identity)": (call(semaphore, "release", "identity"), BAD_IDENTITY),
    "Coordinator.lock(ttl)": (lambda client, bad: Coordinator(client).lock("x", ttl=bad), BAD_TTL),
    "Coordinator.lock(name)": (lambda client, bad: Coordinator(client).lock(bad), BAD_NAME),
    "Coordinator(push)": (option(Coordinator, "push"), BAD_PUSH),
    "Coordinator(claim)": (option(Coordinator, "claim"), BAD_TTL),
    "Coordinator(retry_for)": (option(Coordinator, "retry_for"), BAD_PERIOD),
    "Coordinator(response_timeout)": (option(Coordinator, "response_timeout"), BAD_PERIOD),
    "synchronized(ttl)": (option(decorated, "ttl"), BAD_TTL),
    "synchronized(timeout)": (option(decorated, "timeout"), BAD_SECONDS),
    "synchronized(name)": (option(decorated, "name"), BAD_TEMPLATE),
}


@pytest_asyncio.fixture
async def wire(server: EmbeddedServer) -> AsyncIterator[FaultProxy]:
    """The way to the server, which notices each connection."""
    async with FaultProxy(server) as proxy:
        yield proxy


@pytest.mark.parametrize(("use", "table"), USES.values(), ids=USES)
async def test_e2_a_bad_argument_fails_at_the_call_and_sends_nothing(wire: FaultProxy, use: Use, table: Table) -> None:
    """By a TypeError or ValueError of ours, and not by one from the depths."""
    async with wire.client() as client:

        async def raised(bad: Any) -> Exception | None:
            try:
                result = use(client, bad)
                if isinstance(result, Awaitable):
                    await result
            except Exception as error:
                return error
            return None

        found = {label: await raised(bad) for label, (bad, _) in table.items()}
    ours = (TypeError, ValueError, UnicodeEncodeError)
    right = {
        label: type(error) in ours and isinstance(error, table[label][1]) and bool(str(error))
        for label, error in found.items()
    }
    assert all(right.values()), {label: found[label] for label, is_right in right.items() if not is_right}
    assert wire.connections == 0


async def test_e2_a_bad_extension_leaves_the_lease_alone(sync: Coordinator) -> None:
    async with sync.lock("x", ttl=20) as lease:
        for bad, error in BAD_TTL.values():
            before = lease.remaining()
            with pytest.raises(error, match="ttl"):
                await lease.extend(bad)
            assert 0 < lease.remaining() <= before
            lease.check()


async def test_a_limit_has_to_be_said(redis: Redis) -> None:
    """Also when it is to be the server's: None must not happen by forgetting it."""
    untyped: Any = AsyncSemaphore
    with pytest.raises(TypeError, match="limit"):
        untyped(redis, "x")


CLIENTS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, r"expected a redis\.asyncio\.Redis"),
    "url": (lambda: "redis://localhost", r"for an address use Coordinator\.from_url"),
    "class": (lambda: Redis, r"expected a redis\.asyncio\.Redis"),
    "pool": (lambda: Redis().connection_pool, r"expected a redis\.asyncio\.Redis"),
    "synchronous": (lambda: redis_py.Redis(), r"synchronous client: pass a redis\.asyncio\.Redis"),
    "synchronous pipeline": (lambda: redis_py.Redis().pipeline(), r"synchronous client: pass a redis\.asyncio\.Redis"),
    "pipeline": (lambda: Redis().pipeline(), r"pass a redis\.asyncio\.Redis|expected a redis\.asyncio\.Redis"),
}


@pytest.mark.parametrize(
    "use", [AsyncLock, synchronized, lambda client, _: Coordinator(client)], ids=["lock", "decorator", "coordinator"]
)
async def test_e1_an_object_that_is_no_asyncio_client_is_refused_with_advice(use: Callable[[Any, str], object]) -> None:
    for make, advice in CLIENTS.values():
        with pytest.raises(TypeError, match=advice):
            use(make(), "x")


async def test_a_plain_function_can_not_be_synchronized(redis: Redis) -> None:
    """It would run, and only then the await of its result would fail."""
    ran: list[int] = []
    plain: Any = lambda: ran.append(1)  # noqa: E731
    with pytest.raises(TypeError):
        await synchronized(redis, "x")(plain)()
    assert not ran


NO_LEASE: Mapping[str, Callable[[AsyncReadWriteLock], object]] = {
    "none": lambda rw: None,
    "text": lambda rw: "x",
    "a side": lambda rw: rw.read(),
    "the class": lambda rw: Lease,
}


@pytest.mark.parametrize("which", NO_LEASE)
async def test_only_a_lease_is_downgraded(wire: FaultProxy, which: str) -> None:
    """TypeError at the call, which names the lock, what is expected, and what was found."""
    async with wire.client() as client:
        rw = AsyncReadWriteLock(client, "config")
        bad: Any = NO_LEASE[which](rw)
        with pytest.raises(TypeError, match=f"a writer's lease of 'config', not {re.escape(repr(bad))}"):
            await rw.downgrade(bad)
    assert wire.connections == 0


# -- odd names and identities ------------------------------------------------------------------------------

ODD: tuple[str | bytes, ...] = (
    "schl\u00fcssel \u2603", b"\xff\xfe\x00", b"a\r\nb", "{tag}", "a{tag}b", "{{}", "a:queue", "x:sem", "%d %s {x}",
    " ", "x" * 8192, "|", b"1|2|3|4|5", "0",
)  # fmt: skip


@ways
@each(KINDS, "kind")
@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
async def test_e1_odd_names_and_identities_work_from_end_to_end(
    redis: Redis, name: Any, kind: Primitive, push: Push
) -> None:
    wire = name.encode() if isinstance(name, str) else name
    keys = lock_keys(wire) if kind is LOCK else permit_keys(wire, "sem")
    stays = 2 if kind is LOCK else 1  # when it is free
    async with Coordinator(redis, push=push) as sync:
        it = kind.make(sync, name)
        async with it.acquire(identity=name) as lease:
            assert (await it.statistics()).holders[0].token == lease.identity == lease.token
            assert lease.name == it.name
            waiting = asyncio.create_task(it.acquire(timeout=10, identity=wire + b"|2"))
            await wait_until(waits(it), FAST, timeout=5)
            assert set(await redis.keys()) <= set(keys.all)
        async with asyncio.timeout(5):
            assert (await waiting).fence > lease.fence
        (holder,) = (await it.statistics()).holders
        assert holder.token == (await it.acquire(identity=wire + b"|2")).token
        await it.release(identity=wire + b"|2")
        with pytest.raises(NotHeld):
            await it.release(identity=wire + b"|2")
    assert await redis.keys() == [keys.all[stays]]


async def test_p1_a_name_and_the_same_name_in_braces_are_two_locks(sync: Coordinator) -> None:
    """`a` and `{a}` have two holders' keys, so they must not share a queue: a release of one served the other."""
    bare, braced = sync.lock("a"), sync.lock("{a}")
    released = await bare.acquire()
    async with braced as holder:
        waiting = asyncio.create_task(braced.acquire())
        await wait_until(waits(braced), FAST, timeout=5)
        await released.release()
        await asyncio.wait([waiting], timeout=1)
        assert not waiting.done(), f"two holders of {{a}}: {holder}, {waiting.result()}"
    await (await waiting).release()


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_p1_a_name_that_ends_like_an_engine_is_another_lock(
    redis: Redis, sync: Coordinator, engine: Engine
) -> None:
    async with Coordinator(redis) as other, sync.lock(f"x {engine}"):
        lease = await other.lock("x").acquire()
        with pytest.raises(AcquireTimeout):
            await AsyncLock(sync, "x", engine=engine).acquire(timeout=1)
        await lease.release()


# -- times and numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [timedelta(milliseconds=7000), 7, 7.0])
async def test_a_ttl_may_be_a_timedelta(sync: Coordinator, ttl: Any) -> None:
    """That of a primitive, of a call, and of an extension."""
    for make in (lambda **options: sync.lock("x", **options), lambda **options: sync.semaphore("x", 5, **options)):
        for own, of_lease in ((30, ttl), (ttl, None)):
            it = make(ttl=own)
            lease = await it.acquire(ttl=of_lease)
            for seconds in (7, 3):
                (holder,) = (await it.statistics()).holders
                assert seconds - 1 < (holder.remaining or 0) < seconds + 1
                assert seconds - 1 < lease.remaining() < seconds + 1
                await lease.extend(timedelta(seconds=3))
            await lease.release()


async def test_the_largest_numbers(sync: Coordinator, redis: Redis) -> None:
    """A thousand million permits, for ten years."""
    sem = semaphore(sync, 1_000_000_000, ttl=timedelta(days=3650))
    async with sem.acquire(weight=999_999_999) as lease, sem.acquire() as other:
        assert lease.remaining() > 3e8
        assert await sem.try_acquire() is None
        found = await sem.statistics()
        assert (found.held, found.available) == (1_000_000_000, 0)
        assert {one.token: one.weight for one in found.holders} == {lease.token: 999_999_999, other.token: 1}
        assert all(3e8 < (one.remaining or 0) < 3.2e8 for one in found.holders)
        for key in permit_keys(b"x", "sem").all[:2]:
            assert await redis.pttl(key) > 3e11
    assert (await sem.statistics()).held == 0


@ways
@pytest.mark.parametrize("timeout", [0, -0.0, timedelta(0)], ids=str)
async def test_timeout_0_takes_what_is_free_and_never_waits_or_queues(redis: Redis, timeout: Any, push: Push) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        async with lock.acquire(timeout=timeout):
            with pytest.raises(AcquireTimeout, match="'x' is taken"):
                await lock.acquire(timeout=timeout)
            with pytest.raises(TimeoutError):
                async with lock.acquire(timeout=timeout):
                    pytest.fail("entered")
            assert (await lock.statistics()).waiting == 0
        await (await lock.acquire(timeout=timeout)).release()


@ways
@pytest.mark.parametrize("timeout", [1e9, 1e18, 1.7e308, timedelta.max, 10**300], ids=str)
async def test_e2_a_huge_timeout_is_as_good_as_none(redis: Redis, timeout: Any, push: Push) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        async with lock:
            waiting = asyncio.create_task(lock.acquire(timeout=timeout))
            await wait_until(waits(lock), FAST, timeout=5)
        async with asyncio.timeout(5):
            await (await waiting).release()
            async with lock.acquire(timeout=timeout):
                pass


async def test_a_tiny_timeout_withdraws_its_request(sync: Coordinator) -> None:
    lock = sync.lock("x")
    lease = await lock.acquire()
    for timeout in (5e-324, 1e-9, 0.001):
        with pytest.raises((AcquireTimeout, ConnectionError, redis_py.ConnectionError)):
            await lock.acquire(timeout=timeout)
    await wait_until(waits(lock, 0), FAST, timeout=5)
    await lease.release()


# -- foreign keys (D15) ------------------------------------------------------------------------------------

FOREIGN: Mapping[str, Callable[[Any, bytes], Awaitable[object]]] = {
    "string": lambda redis, key: redis.set(key, "5"),
    "list": lambda redis, key: redis.rpush(key, "5"),
    "set": lambda redis, key: redis.sadd(key, "5"),
}
COMMANDS: Mapping[str, Callable[[AsyncSemaphore], Awaitable[object]]] = {
    "acquire": lambda sem: sem.acquire(),
    "try_acquire": lambda sem: sem.try_acquire(),
    "async with": lambda sem: sem.acquire().__aenter__(),
    "release": lambda sem: sem.release(identity="worker-7"),
    "resize": lambda sem: sem.resize(7),
    "statistics": lambda sem: sem.statistics(),
}
each_key = pytest.mark.parametrize("which", [0, 1, 2], ids=["permits", "state", "queue"])


@ways
@each_key
@pytest.mark.parametrize("foreign", FOREIGN)
async def test_d15_a_foreign_key_is_told_and_left_alone(redis: Redis, foreign: str, which: int, push: Push) -> None:
    """Not waited for, and nothing is written anywhere."""
    client: Any = redis
    async with Coordinator(redis, push=push) as sync:
        sem = semaphore(sync)
        key = permit_keys(b"x", "sem").all[which]
        await FOREIGN[foreign](redis, key)
        before = await client.dump(key)
        for use in COMMANDS:
            with pytest.raises(WrongKeyType, match="choose another name") as caught:
                await asyncio.wait_for(COMMANDS[use](sem), 15)
            assert caught.value.code == "WRONGTYPE"
            assert await client.dump(key) == before, use
            assert await redis.keys() == [key], use
        assert sem.limit == 5


@each_key
async def test_d15_a_foreign_key_while_it_is_held(sync: Coordinator, redis: Redis, which: int) -> None:
    """Nothing is changed by a command that fails; when the key is back, no permit is lost or doubled."""
    sem = semaphore(sync, 3)
    kept, lease = await sem.acquire(), await sem.acquire(weight=2)
    waiting = asyncio.create_task(sem.acquire(weight=2))
    await wait_until(waits(sem), FAST, timeout=5)
    before = await sem.statistics()
    key = permit_keys(b"x", "sem").all[which]
    await redis.rename(key, "away")
    await redis.set(key, "foreign")
    for use in (lease.release, lambda: lease.extend(5), lambda: sem.resize(9), sem.try_acquire, sem.statistics):
        with pytest.raises(WrongKeyType):
            await use()
    await redis.rename("away", key)
    found = await sem.statistics()
    assert (found.limit, found.held, found.waiting) == (before.limit, before.held, before.waiting)
    lease.check()
    assert not waiting.done()
    await lease.release()
    next_lease = await asyncio.wait_for(waiting, 15)
    assert (await sem.statistics()).held == 3
    await next_lease.release()
    await kept.release()
    assert (await sem.statistics()).held == 0


async def test_d15_a_foreign_member_of_the_queue_does_not_break_a_look(sync: Coordinator, redis: Redis) -> None:
    """It is no request: it is neither listed nor counted."""
    lock, semaphore, both = AsyncLock(sync, "n"), AsyncSemaphore(sync, "n", limit=1), AsyncReadWriteLock(sync, "n")
    async with lock, semaphore, both.write():
        for queue in ("{n}:queue", "{n}:sem:queue", "{n}:rw:queue"):
            await redis.zadd(queue, {"junk": 1})
        for found in (await lock.statistics(), await semaphore.statistics(), await both.statistics()):
            assert (found.waiting, found.waiters) == (0, ())
