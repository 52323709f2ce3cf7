"""What others do while tasks wait: a holder makes its lease shorter, other clients write the key of the lock.

P3: what wakes a waiter sooner than its own look. A waiter that looks `NEVER` by itself is woken by something else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncSemaphore,
    Backoff,
    Coordinator,
    Lease,
    LeaseLost,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.types import Engine, Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inside import POLLERS_TICKET, hub_of, now, permit_keys, tuned
from ..support.inspecting import calls
from ..support.primitives import (
    LOCK,
    ROBUST,
    SEMAPHORE,
    SHARED_LOCK,
    WATCHED_LOCK,
    WATCHED_SEMAPHORE,
    WRITER,
    Primitive,
    each,
)
from ..support.views import tokens

NAME = "neighbour"
NEVER = 300.0
SELDOM = Backoff(initial=60, cap=60, jitter=False)
ways = pytest.mark.parametrize("push", ["auto", "never"])
shared_or_not = pytest.mark.parametrize("share", [False, True])

SHARED = replace(SHARED_LOCK, own={**SHARED_LOCK.own, "max_hold": 30})  # what is shared is always renewed
LOCKS = {it.label: it for it in (LOCK, WATCHED_LOCK, SHARED)}
EXCLUSIVE = (*LOCKS.values(), SEMAPHORE, WATCHED_SEMAPHORE, WRITER, ROBUST)


def make(kind: Primitive, sync: Coordinator) -> Any:
    return kind.make(sync, NAME, **({} if kind.share else {"auto_renew": False}))


def compatible(client: Redis, **options: Any) -> Any:
    return client.lock(NAME, timeout=30, lock_class=Lock, **options)


async def waiting(lock: Any, waiters: int = 1) -> None:
    """Wait until so many wait at the server, or behind a task of this process."""
    await wait_until(waits(lock, waiters), FAST, timeout=5)


# -- the holder makes its lease shorter ----------------------------------------------------------------------


@each(EXCLUSIVE, "kind")
async def test_the_next_waiter_hears_that_a_lease_was_made_shorter(
    kind: Primitive, sync: Coordinator, make_client: MakeClient
) -> None:
    """It has the lock when the shorter lease has ended."""
    async with tuned(make_client(), poll_cap=NEVER) as other:
        holder = make(LOCK if kind.share else kind, sync)
        lease: Lease = await holder.acquire()
        waiter = asyncio.create_task(make(kind, other).acquire())
        await waiting(holder)
        await lease.extend(1)
        await (await asyncio.wait_for(waiter, 3)).release()


# -- other clients write the key -----------------------------------------------------------------------------


async def release_by_our_token(redis: Redis, key: str) -> None:
    stock = redis.lock(key, timeout=30)
    stock.local.token = await redis.get(key)
    await stock.release()


DEEDS: Mapping[str, Callable[[Any, str], Awaitable[object]]] = {
    "DEL": lambda redis, key: redis.delete(key),
    "PEXPIRE": lambda redis, key: redis.pexpire(key, 100),
    "SET": lambda redis, key: redis.set(key, "somebody else", px=200),
    "release by a stock lock": release_by_our_token,
}


@pytest.mark.parametrize(("kind", "most"), [("compat", 1.3), *((label, 3) for label in LOCKS)], ids=str)
@pytest.mark.parametrize("deed", DEEDS)
async def test_a_deed_of_other_clients_is_noticed_in_time(
    redis: Redis, make_client: MakeClient, kind: str, most: float, deed: str
) -> None:
    """Waiters of `compat.Lock` notice it within a second, others within three."""
    async with Coordinator(make_client()) as sync, Coordinator(make_client()) as other:
        await AsyncLock(other, NAME, auto_renew=False).acquire(timeout=5)
        made = compatible(redis) if kind == "compat" else make(LOCKS[kind], sync)
        waiter = asyncio.ensure_future(made.acquire())
        await waiting(AsyncLock(other, NAME))
        await DEEDS[deed](redis, NAME)
        assert await asyncio.wait_for(waiter, most)


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_tasks_that_share_notice_that_the_lease_of_their_process_is_gone(
    redis: Redis, make_client: MakeClient, kind: str
) -> None:
    """They wait behind a task of their own process, without a ticket: its lease is looked at for them."""
    async with Coordinator(make_client()) as sync:
        lock: Any = AsyncLock(sync, NAME, share=True)
        if kind == "semaphore":
            lock = AsyncSemaphore(sync, NAME, limit=1, share=True)
        lease = await lock.acquire()
        waiter = asyncio.create_task(lock.acquire())
        await waiting(lock)
        await redis.delete(NAME, *permit_keys(NAME.encode(), "sem").all[:2])
        taken = await asyncio.wait_for(waiter, 3)
        assert lease.lost
        await taken.release()


@pytest.mark.parametrize(("kind", "most"), [("compat", 31), ("lock", 14), ("semaphore", 14)])
async def test_waiting_costs_a_command_a_second_at_most(
    redis: Redis, other: Coordinator, make_client: MakeClient, kind: str, most: int
) -> None:
    """For all tasks of a process that wait for a name: of `compat.Lock` one a second, of others one in 2.5 seconds."""
    one = SEMAPHORE if kind == "semaphore" else LOCK
    holder = make(one, other)
    await holder.acquire(ttl=600)
    client = make_client()
    async with Coordinator(client) as sync:
        made = [compatible(client) if kind == "compat" else make(one, sync) for _ in range(20)]
        waiters = [asyncio.ensure_future(it.acquire()) for it in made]
        await waiting(holder, 20)
        before = await calls(redis, "evalsha")
        await asyncio.sleep(30)
        assert most / 2 <= await calls(redis, "evalsha") - before <= most
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)


# -- everything is lost --------------------------------------------------------------------------------------


@each(EXCLUSIVE, "kind")
async def test_waiters_wake_when_the_holder_beside_them_learns_of_its_loss(
    kind: Primitive, redis: Redis, make_client: MakeClient
) -> None:
    """After FLUSHALL the holder learns of its loss by its renewal; all who wait in its process have their turn then."""
    async with tuned(make_client(), poll_cap=NEVER) as sync:
        lock = make(kind, sync)
        lease: Lease = await lock.acquire(ttl=3)

        async def use() -> None:
            taken = await lock.acquire()
            await asyncio.sleep(0)
            await taken.release()

        waiters = [asyncio.create_task(use()) for _ in range(5)]
        await waiting(lock, 5)
        await redis.flushall()
        with pytest.raises(LeaseLost):
            await lease.extend(3)
        await asyncio.wait_for(asyncio.gather(*waiters), 3)


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_one_look_finds_out_that_all_have_lost_their_places(
    redis: Redis, make_client: MakeClient, kind: str, engine: Engine
) -> None:
    """The oldest ticket looks every half second; when it is told that it is new, all others ask again as well."""
    async with tuned(make_client(), poll_cap=0.5) as sync:
        lock: Any = AsyncLock(sync, NAME, engine=engine)
        if kind == "semaphore":
            lock = AsyncSemaphore(sync, NAME, limit=1, engine=engine)
        lease = await lock.acquire()
        waiters = [asyncio.create_task(lock.acquire()) for _ in range(10)]
        await waiting(lock, 10)
        queue = permit_keys(NAME.encode(), "sem").all[2] if kind == "semaphore" else f"{{{NAME}}}:queue"
        before = await redis.zrange(queue, 0, -1)
        await redis.delete(queue)
        await waiting(lock, 10)
        assert await redis.zrange(queue, 0, -1) == before, "P2: in the order of arrival"
        await lease.release()
        for waiter in waiters:
            await (await asyncio.wait_for(waiter, 3)).release()


# -- behind a holder that knows no queue ---------------------------------------------------------------------


@ways
@shared_or_not
async def test_behind_a_foreign_holder_a_wait_looks_when_its_time_has_passed(
    redis: Redis, make_client: MakeClient, share: bool, push: Push
) -> None:
    """The server said for how long the key lasts. The back-off alone would look a minute later."""
    async with tuned(make_client(), poll=SELDOM, poll_cap=NEVER, push=push) as sync:
        await redis.set(NAME, "foreign", px=3000)
        lease = await asyncio.wait_for(AsyncLock(sync, NAME, share=share).acquire(), 5)
        await lease.release()


@ways
@shared_or_not
async def test_behind_a_foreign_holder_a_wait_ends_with_a_last_look(
    redis: Redis, make_client: MakeClient, share: bool, push: Push
) -> None:
    """The key goes in the middle of the wait, and nobody says so. What is free at its end is taken, by one."""
    async with tuned(make_client(), poll=SELDOM, poll_cap=NEVER, push=push) as sync:
        lock = AsyncLock(sync, NAME, share=share)
        await redis.set(NAME, "foreign", px=60_000)
        waiters = [asyncio.create_task(lock.acquire(timeout=10)) for _ in range(2)]
        await waiting(lock, 2)
        await redis.delete(NAME)
        first, second = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 12)
        assert isinstance(first, Lease)
        assert isinstance(second, TimeoutError)
        await first.release()
        await waiting(lock, 0)


@pytest.mark.parametrize("token", [None, "mine"])
async def test_a_blocking_timeout_ends_with_a_last_look(
    redis: Redis, make_client: MakeClient, token: str | None
) -> None:
    """As the test above. With ``token=`` a lock polls by itself, every ``sleep`` seconds."""
    client = make_client()
    hub_of(client).options.poll = SELDOM
    lock = compatible(client, sleep=60)
    hub_of(client).options.poll_cap = NEVER
    await redis.set(NAME, "foreign", px=60_000)
    before = await calls(redis, "evalsha")
    waiter = asyncio.create_task(lock.acquire(blocking_timeout=10, token=token))

    async def asked() -> bool:
        return await calls(redis, "evalsha") >= before + (2 if token is None else 1)

    await wait_until(asked, FAST, timeout=5)
    await redis.delete(NAME)
    assert await asyncio.wait_for(waiter, 12)
    await lock.release()


# -- clients that poll for the key ---------------------------------------------------------------------------


async def busy(locks: Sequence[Any], begun: asyncio.Event, stop: asyncio.Event) -> int:
    """Let two tasks contend for what is always held, one with each lock; return how often it was held."""
    entered = 0

    async def work(lock: Any) -> None:
        nonlocal entered
        while not stop.is_set():
            async with lock:
                entered += 1
                if entered > 10:
                    begun.set()
                await asyncio.sleep(0.01)

    await asyncio.gather(*(work(lock) for lock in locks))
    return entered


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_stock_lock_that_polls_gets_its_turn(redis: Redis, make_client: MakeClient, processes: int) -> None:
    """Within two seconds, next to two busy tasks; they get it back as soon as it was free for long enough."""
    begun, stop = asyncio.Event(), asyncio.Event()
    clients = [redis, make_client() if processes == 2 else redis]
    contest = asyncio.create_task(busy([compatible(client) for client in clients], begun, stop))
    await asyncio.wait_for(begun.wait(), 5)
    poller = make_client().lock(NAME, timeout=30, sleep=0.1)
    began = now()
    assert await asyncio.wait_for(poller.acquire(), 20)
    assert now() - began < 2
    await poller.release()
    stop.set()
    assert await asyncio.wait_for(contest, 10) > 20
    assert await redis.exists(NAME, f"{{{NAME}}}:queue") == 0


async def test_a_lock_that_is_seldom_contended_is_handed_over_immediately(
    redis: Redis, make_client: MakeClient
) -> None:
    """It is left free only where it was handed over without a break: a release without waiters ends that."""
    mine, theirs = (compatible(client) for client in (redis, make_client()))
    await mine.acquire()
    waiter = asyncio.create_task(theirs.acquire())
    await waiting(AsyncLock(redis, NAME))
    await mine.release()
    assert await redis.exists(NAME), "it has a holder"
    assert await redis.exists(f"{{{NAME}}}:polls"), "since when it was handed over"
    assert await asyncio.wait_for(waiter, 3)
    await theirs.release()
    assert not await redis.exists(NAME, f"{{{NAME}}}:polls")


async def test_while_it_is_left_free_for_others_our_own_wait(
    redis: Redis, sync: Coordinator, other: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: our tasks keep their order, and no waiter is counted twice."""
    monkeypatch.setattr("redis_sync_aio.compat.GAP_MS", 1500)
    lock, held = sync.lock(NAME), compatible(redis)
    await held.acquire()
    waiter = asyncio.create_task(other.lock(NAME).acquire())
    await waiting(lock)
    await redis.zadd(f"{{{NAME}}}:polls", {POLLERS_TICKET: 1})
    await held.release()
    assert not await redis.exists(NAME)
    assert await lock.try_acquire() is None
    found = await lock.statistics()
    assert (bool(found.held), found.waiting, len(tokens(found.waiters))) == (False, 1, 1)
    began = now()
    lease = await asyncio.wait_for(waiter, 5)
    assert now() - began > 0.5
    await lease.release()
