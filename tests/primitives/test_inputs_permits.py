"""Inputs of semaphores on a real server (E1, E2, D15): bad ones fail at the call, foreign keys are told.

What semaphores share with locks (durations, identities, odd arguments of a coordinator) is in test_inputs.py.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, Lease, wait_until
from redis_sync_aio.errors import WrongKeyType

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.factories import Client
from ..support.inputs import BAD_IDENTITY, BAD_NAME, BAD_SECONDS, BAD_TTL, Table, nothing_sent
from ..support.inside import permit_keys

BAD_PERMITS: Table = {
    "0": (0, ValueError),
    "-1": (-1, ValueError),
    "2**31": (2**31, ValueError),
    "10**400": (10**400, ValueError),
    "true": (True, TypeError),
    "false": (False, TypeError),
    "1.5": (1.5, TypeError),
    "1.0": (1.0, TypeError),
    "nan": (math.nan, TypeError),
    "inf": (math.inf, TypeError),
    "text": ("5", TypeError),
    "decimal": (Decimal(5), TypeError),
    "list": ([1], TypeError),
}
BAD_LIMIT: Table = {name: bad for name, bad in BAD_PERMITS.items() if name != "0"}
NO_TTL: Table = {**BAD_TTL, "none": (None, TypeError)}
NO_WEIGHT: Table = {**BAD_PERMITS, "none": (None, TypeError), "above the limit": (6, ValueError)}

Use = Callable[[Redis, AsyncSemaphore, Any], object]


def make(client: Any, name: Any = "x", limit: Any = 5, **options: Any) -> AsyncSemaphore:
    return AsyncSemaphore(client, name, limit=limit, **options)


USES: Mapping[str, tuple[Use, Table]] = {
    "AsyncSemaphore(name)": (lambda client, sem, bad: make(client, bad), BAD_NAME),
    "AsyncSemaphore(limit)": (lambda client, sem, bad: make(client, limit=bad), BAD_LIMIT),
    "AsyncSemaphore(ttl)": (lambda client, sem, bad: make(client, ttl=bad), NO_TTL),
    "AsyncSemaphore(max_hold)": (lambda client, sem, bad: make(client, max_hold=bad), BAD_TTL),
    "AsyncSemaphore(auto_renew)": (
        lambda client, sem, bad: make(client, auto_renew=bad),
        {"1": (1, TypeError), "none": (None, TypeError)},
    ),
    "AsyncSemaphore(on_lost)": (lambda client, sem, bad: make(client, on_lost=bad), {"ignore": ("ignore", ValueError)}),
    "acquire(weight)": (lambda client, sem, bad: sem.acquire(weight=bad), NO_WEIGHT),
    "acquire(timeout)": (lambda client, sem, bad: sem.acquire(timeout=bad), BAD_SECONDS),
    "acquire(ttl)": (lambda client, sem, bad: sem.acquire(ttl=bad), BAD_TTL),
    "acquire(identity)": (lambda client, sem, bad: sem.acquire(identity=bad), BAD_IDENTITY),
    "try_acquire(weight)": (lambda client, sem, bad: sem.try_acquire(weight=bad), NO_WEIGHT),
    "resize(limit)": (lambda client, sem, bad: sem.resize(bad), {**BAD_LIMIT, "none": (None, TypeError)}),
    "release(identity)": (lambda client, sem, bad: sem.release(identity=bad), BAD_IDENTITY),
}
CASES = [
    pytest.param(use, value, error, id=f"{name}-{label}")
    for name, (use, table) in USES.items()
    for label, (value, error) in table.items()
]


@pytest.mark.parametrize(("use", "bad", "error"), CASES)
async def test_e2_a_bad_argument_fails_at_the_call_and_sends_nothing(
    redis: Redis, make_client: MakeClient, use: Use, bad: Any, error: type[Exception]
) -> None:
    client = make_client()
    sem = make(client)

    async def call() -> None:
        result = use(client, sem, bad)
        if isinstance(result, Awaitable):
            await result

    async with nothing_sent(redis):
        with pytest.raises(error) as caught:
            await call()
    assert type(caught.value) in (TypeError, ValueError, UnicodeEncodeError), "ours, not one from the depths"
    assert str(caught.value)
    assert sem.limit == 5


async def test_a_limit_has_to_be_said(redis: Redis) -> None:
    """Also when it is to be the server's: None must not happen by forgetting it."""
    semaphore: Any = AsyncSemaphore
    with pytest.raises(TypeError, match="limit"):
        semaphore(redis, "x")


NO_LEASE: Mapping[str, Callable[[AsyncReadWriteLock], object]] = {
    "none": lambda rw: None,
    "text": lambda rw: "x",
    "a side": lambda rw: rw.read(),
    "the class": lambda rw: Lease,
}


@pytest.mark.parametrize("which", NO_LEASE)
async def test_only_a_lease_is_downgraded(redis: Redis, make_client: MakeClient, which: str) -> None:
    """TypeError at the call, which names the lock, what is expected, and what was found."""
    rw = AsyncReadWriteLock(make_client(), "config")
    bad: Any = NO_LEASE[which](rw)
    found = re.escape(repr(bad))
    async with nothing_sent(redis):
        with pytest.raises(TypeError, match=f"a writer's lease of 'config', not {found}"):
            await rw.downgrade(bad)


@pytest.mark.parametrize("ttl", [timedelta(milliseconds=7000), 7, 7.0])
async def test_a_ttl_may_be_a_timedelta(sync: Coordinator, ttl: Any) -> None:
    sem = make(sync)
    for own, of_lease in ((30, ttl), (ttl, None)):
        lease = await make(sync, ttl=own).acquire(ttl=of_lease)
        (holder,) = (await sem.statistics()).holders
        assert 6 < (holder.remaining or 0) <= 7
        await lease.extend(timedelta(seconds=3))
        (holder,) = (await sem.statistics()).holders
        assert 2 < (holder.remaining or 0) <= 3
        await lease.release()


async def test_the_largest_numbers(sync: Coordinator, redis: Redis) -> None:
    """A thousand million permits, for ten years."""
    sem = make(sync, limit=1_000_000_000, ttl=timedelta(days=3650))
    async with sem.acquire(weight=999_999_999) as lease, sem.acquire() as other:
        assert lease.remaining() > 3e8
        assert await sem.try_acquire() is None
        found = await sem.statistics()
        assert (found.held, found.available) == (1_000_000_000, 0)
        assert {one.token: one.weight for one in found.holders} == {lease.token: 999_999_999, other.token: 1}
        assert all(3e8 < (one.remaining or 0) < 3.2e8 for one in found.holders)
        for key in sem._keys.all[:2]:
            assert await redis.pttl(key) > 3e11
    assert (await sem.statistics()).held == 0


ODD: tuple[str | bytes, ...] = (
    "schl\u00fcssel \u2603", b"\xff\xfe\x00", b"a\r\nb", "{tag}", "a{tag}b", "%d %s {x}", "x:sem", "x" * 8192,
    b"1|2|3|4|5",
)  # fmt: skip


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
async def test_e1_odd_names_and_identities_work_from_end_to_end(redis: Redis, name: Any, push: Any) -> None:
    wire = name.encode() if isinstance(name, str) else name
    async with Coordinator(redis, push=push) as sync:
        sem = make(sync, name, 3)
        async with sem.acquire(weight=2, identity=name) as lease:
            assert (await sem.statistics()).holders[0].token == lease.identity == lease.token
            waiting = asyncio.create_task(sem.acquire(weight=2, timeout=10, identity=wire + b"|2"))
            await wait_until(waits(sem), FAST, timeout=5)
            assert set(await redis.keys()) <= set(permit_keys(wire, "sem").all)
        async with asyncio.timeout(5):
            next_lease: Lease = await waiting
        assert next_lease._grant.wire_token == wire + b"|2"
        assert next_lease.fence > lease.fence
        await sem.release(identity=wire + b"|2")
        assert (await sem.statistics()).held == 0
    assert await redis.keys() == [sem._keys.all[1]]


# -- foreign keys ------------------------------------------------------------------------------------------

FOREIGN: Mapping[str, Callable[[Client, bytes], Awaitable[object]]] = {
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


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["permits", "state", "queue"])
@pytest.mark.parametrize("foreign", FOREIGN)
async def test_d15_a_foreign_key_is_told_and_left_alone(redis: Redis, foreign: str, which: int, push: Any) -> None:
    """Not waited for, and nothing is written anywhere."""
    async with Coordinator(redis, push=push) as sync:
        sem = make(sync)
        key = sem._keys.all[which]
        await FOREIGN[foreign](redis, key)
        before = await redis.dump(key)
        for use in COMMANDS:
            with pytest.raises(WrongKeyType, match="choose another name") as caught:
                await asyncio.wait_for(COMMANDS[use](sem), 15)
            assert caught.value.code == "WRONGTYPE"
            assert await redis.dump(key) == before, use
            assert await redis.keys() == [key], use
        assert sem.limit == 5


@pytest.mark.parametrize("which", [0, 1, 2], ids=["permits", "state", "queue"])
async def test_d15_a_foreign_key_while_it_is_held(sync: Coordinator, redis: Redis, which: int) -> None:
    """Nothing is changed by a command that fails; when the key is back, all goes on: no permit is lost or doubled."""
    sem = make(sync, limit=3)
    kept, lease = await sem.acquire(), await sem.acquire(weight=2)
    waiting = asyncio.create_task(sem.acquire(weight=2))
    await wait_until(waits(sem), FAST, timeout=5)
    before = await sem.statistics()
    key = sem._keys.all[which]
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
