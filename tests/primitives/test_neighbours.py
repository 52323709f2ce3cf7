"""What others do while tasks wait: a holder makes its lease shorter, other clients write the key of the lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Backoff,
    Coordinator,
    Lease,
    wait_until,
)
from redis_sync_aio.compat import Lock

from ..conftest import MakeClient
from ..support.body import waits
from ..support.compat import calls
from ..support.inside import POLLERS_TICKET, hub_of, permit_keys, tuned
from ..support.timed import Timed
from ..support.views import tokens

NAME = "neighbour"
FAST = Backoff(initial=0.001, cap=0.01)
SELDOM = Backoff(initial=60, cap=60, jitter=False)
NEVER = 300.0
SOON = 3.0
"""Seconds, with those of a busy machine, in which something happens that else would take tens of them."""


@pytest_asyncio.fixture
async def sync(redis: Redis) -> AsyncIterator[Coordinator]:
    """A coordinator that looks as often as one does by default."""
    async with Coordinator(redis) as coordinator:
        yield coordinator


@pytest_asyncio.fixture
async def other(make_client: MakeClient, redis: Redis) -> AsyncIterator[Coordinator]:
    """Another such process."""
    async with Coordinator(make_client()) as coordinator:
        yield coordinator


Make = Callable[..., Any]
"""Makes it for a coordinator, of the name `NAME` or another."""
EXCLUSIVE: Mapping[str, Make] = {
    "lock": lambda sync, name=NAME: AsyncLock(sync, name, auto_renew=False),
    "lock-watch": lambda sync, name=NAME: AsyncLock(sync, name, auto_renew=False, engine="watch"),
    "lock-shared": lambda sync, name=NAME: AsyncLock(sync, name, share=True, max_hold=30),
    "semaphore": lambda sync, name=NAME: AsyncSemaphore(sync, name, limit=1, auto_renew=False),
    "semaphore-watch": lambda sync, name=NAME: AsyncSemaphore(sync, name, limit=1, auto_renew=False, engine="watch"),
    "writer": lambda sync, name=NAME: AsyncReadWriteLock(sync, name, auto_renew=False).write(),
    "robust": lambda sync, name=NAME: AsyncRobustLock(sync, name, auto_renew=False),
}


async def waiting(lock: Any, waiters: int = 1) -> None:
    """Wait until so many wait at the server, or behind a task of this process."""
    await wait_until(waits(lock, waiters), FAST, timeout=5)


def looks_at(make: Make, sync: Coordinator) -> Any:
    """Return what has statistics."""
    made = make(sync)
    return AsyncReadWriteLock(sync, NAME) if not hasattr(made, "statistics") else made


# -- the holder makes its lease shorter ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXCLUSIVE)
async def test_the_next_waiter_hears_that_a_lease_was_made_shorter(
    kind: str, sync: Coordinator, make_client: MakeClient
) -> None:
    """P3: it has the lock when the shorter lease has ended, although it looks by itself only every five minutes."""
    async with tuned(make_client(), poll_cap=NEVER) as other:
        holder = EXCLUSIVE["lock" if kind == "lock-shared" else kind]  # what is shared is always renewed
        lease: Lease = await holder(sync).acquire()
        waiter = asyncio.create_task(EXCLUSIVE[kind](other).acquire())
        await waiting(looks_at(holder, sync))
        await lease.extend(0.3)
        taken = await asyncio.wait_for(waiter, SOON)
        await taken.release()


@pytest.mark.parametrize("shorten", ["extend", "reacquire"])
async def test_a_stock_like_lock_that_is_made_shorter_wakes_its_waiters(
    redis: Redis, make_client: MakeClient, shorten: str
) -> None:
    holder = redis.lock(NAME, timeout=30, lock_class=Lock)
    await holder.acquire()
    async with tuned(make_client(), poll_cap=NEVER) as other:
        waiter = asyncio.create_task(AsyncLock(other, NAME).acquire())
        await waiting(AsyncLock(other, NAME))
        if shorten == "reacquire":
            holder.timeout = 0.3
            await holder.reacquire()
        else:
            await holder.extend(0.3, replace_ttl=True)
        taken = await asyncio.wait_for(waiter, SOON)
        await taken.release()


# -- other clients write the key -----------------------------------------------------------------------------


async def _delete(redis: Redis, key: bytes) -> None:
    await redis.delete(key)


async def _shorten(redis: Redis, key: bytes) -> None:
    await redis.pexpire(key, 100)


async def _overwrite(redis: Redis, key: bytes) -> None:
    await redis.set(key, "somebody else", px=200)


async def _release_by_our_token(redis: Redis, key: bytes) -> None:
    stock = redis.lock(key, timeout=30)
    stock.local.token = await redis.get(key)
    await stock.release()


Deed = Callable[[Redis, bytes], Awaitable[None]]
DEEDS: Mapping[str, Deed] = {
    "DEL": _delete,
    "PEXPIRE": _shorten,
    "SET": _overwrite,
    "release by a stock lock": _release_by_our_token,
}


@pytest.mark.parametrize("waits", ["compat", "lock", "lock-watch", "lock-shared"])
async def test_what_other_clients_do_is_noticed_in_time(
    redis: Redis, sync: Coordinator, other: Coordinator, waits: str
) -> None:
    """Waiters of `compat.Lock` notice it within a second, others within three. Each deed to a lock of its own."""

    async def notices(name: str, deed: Deed) -> None:
        await AsyncLock(other, name, auto_renew=False).acquire(timeout=5)
        if waits == "compat":
            acquire: Awaitable[Any] = redis.lock(name, timeout=30, lock_class=Lock).acquire()
        else:
            acquire = EXCLUSIVE[waits](sync, name).acquire()
        waiter = asyncio.ensure_future(acquire)
        await waiting(AsyncLock(other, name))
        await deed(redis, name.encode())
        # A second more, for what is slow on a busy machine. (Of a shared lock the wait is for what its process asked.)
        assert await asyncio.wait_for(waiter, 2 if waits == "compat" else 4), name

    async with asyncio.TaskGroup() as deeds:
        for name, deed in DEEDS.items():
            deeds.create_task(notices(name, deed))


async def test_permits_that_other_clients_delete_are_noticed_in_time(
    redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    async def notices(name: str, **options: Any) -> None:
        await AsyncSemaphore(other, name, limit=1, auto_renew=False).acquire()
        waiter = asyncio.create_task(AsyncSemaphore(sync, name, limit=1, **options).acquire())
        await waiting(AsyncSemaphore(other, name, limit=1))
        await redis.delete(*permit_keys(name.encode(), "sem").all[:2])
        assert await asyncio.wait_for(waiter, 4), name

    async with asyncio.TaskGroup() as engines:
        for engine in ("lua", "watch"):
            engines.create_task(notices(engine, engine=engine))


@pytest.mark.parametrize(("waits", "most"), [("compat", 4), ("lock", 2), ("semaphore", 2)])
async def test_waiting_costs_a_command_a_second_at_most(
    redis: Redis, other: Coordinator, sync: Coordinator, make_client: MakeClient, waits: str, most: int
) -> None:
    """For all tasks of a process that wait for a name: of `compat.Lock` one a second, of others one in 2.5 seconds."""
    seconds = 3.0
    holder = EXCLUSIVE["semaphore" if waits == "semaphore" else "lock"](other)
    await holder.acquire()
    client = make_client()
    if waits == "compat":
        waiters = [asyncio.create_task(client.lock(NAME, timeout=30, lock_class=Lock).acquire()) for _ in range(20)]
    else:
        waiters = [asyncio.create_task(EXCLUSIVE[waits](sync).acquire()) for _ in range(20)]
    await waiting(holder, 20)
    before = await calls(redis, "evalsha")
    await asyncio.sleep(seconds)
    assert 1 <= await calls(redis, "evalsha") - before <= most
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


# -- everything is lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EXCLUSIVE.values(), ids=EXCLUSIVE)
async def test_waiters_wake_when_the_holder_beside_them_learns_of_its_loss(
    make: Make, redis: Redis, make_client: MakeClient
) -> None:
    """After FLUSHALL the holder learns of its loss by its renewal; all who wait in its process have their turn then."""
    async with tuned(make_client(), poll_cap=NEVER) as sync:
        lock = make(sync)
        lease: Lease = await lock.acquire(ttl=1.5)

        async def use() -> None:
            taken = await lock.acquire()
            await asyncio.sleep(0)
            await taken.release()

        waiters = [asyncio.create_task(use()) for _ in range(5)]
        await waiting(looks_at(make, sync), 5)
        await redis.flushall()
        if not lease._grant.auto_renew:
            with pytest.raises(Exception, match="lost"):
                await lease.extend(1)
        await asyncio.wait_for(asyncio.gather(*waiters), SOON)


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_one_look_finds_out_that_all_have_lost_their_places(
    redis: Redis, other: Coordinator, make_client: MakeClient, kind: str, engine: Any
) -> None:
    """The oldest ticket looks every half second; when it is told that it is new, all others ask again as well."""
    async with tuned(make_client(), poll_cap=0.5) as sync:
        lock: Any = AsyncLock(sync, NAME, engine=engine)
        if kind == "semaphore":
            lock = AsyncSemaphore(sync, NAME, limit=1, engine=engine)
        lease = await lock.acquire()
        waiters = [asyncio.create_task(lock.acquire()) for _ in range(10)]
        await waiting(lock, 10)
        keys = permit_keys(NAME.encode(), "sem").all[2] if kind == "semaphore" else f"{{{NAME}}}:queue"
        before = await redis.zrange(keys, 0, -1)
        await redis.delete(keys)
        await waiting(lock, 10)
        assert await redis.zrange(keys, 0, -1) == before, "P2: in the order of arrival"
        await lease.release()
        for waiter in waiters:
            await (await asyncio.wait_for(waiter, SOON)).release()


# -- behind a holder that knows no queue ---------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_behind_a_foreign_holder_a_wait_looks_when_its_time_is_over(
    redis: Redis, make_client: MakeClient, share: bool, push: Any
) -> None:
    """The server said for how long the key lasts. The back-off alone would look a minute later."""
    async with tuned(make_client(), poll=SELDOM, poll_cap=NEVER, push=push) as sync:
        await redis.set(NAME, "foreign", px=300)
        lease = await asyncio.wait_for(AsyncLock(sync, NAME, share=share).acquire(), SOON)
        await lease.release()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_behind_a_foreign_holder_a_wait_ends_with_a_last_look(
    redis: Redis, make_client: MakeClient, share: bool, push: Any
) -> None:
    """The key goes in the middle of the wait, and nobody says so. What is free at its end is taken."""
    async with tuned(make_client(), poll=SELDOM, poll_cap=NEVER, push=push) as sync:
        lock = AsyncLock(sync, NAME, share=share)
        await redis.set(NAME, "foreign", px=60_000)
        waiters = [asyncio.create_task(lock.acquire(timeout=1)) for _ in range(2)]
        await waiting(lock, 2)
        await redis.delete(NAME)
        first, second = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), SOON)
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
    lock = client.lock(NAME, timeout=30, sleep=60, lock_class=Lock)
    hub_of(client).options.poll_cap = NEVER
    await redis.set(NAME, "foreign", px=60_000)
    before = await calls(redis, "evalsha")
    waiter = asyncio.create_task(lock.acquire(blocking_timeout=0.9, token=token))

    async def asked() -> bool:
        return await calls(redis, "evalsha") >= before + (2 if token is None else 1)

    await wait_until(asked, FAST, timeout=5)
    await redis.delete(NAME)
    assert await asyncio.wait_for(waiter, SOON)
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


BUSY: Mapping[str, Callable[[Redis, Redis], Sequence[Any]]] = {
    "one process": lambda a, b: [a.lock(NAME, timeout=30, lock_class=Lock) for _ in "ab"],
    "two processes": lambda a, b: [client.lock(NAME, timeout=30, lock_class=Lock) for client in (a, b)],
}


@pytest.mark.parametrize("locks", BUSY.values(), ids=BUSY)
async def test_a_stock_lock_that_polls_gets_its_turn(redis: Redis, make_client: MakeClient, locks: Any) -> None:
    """Within two seconds, next to two busy tasks; they go on as soon as the key was free for long enough."""
    begun, stop = asyncio.Event(), asyncio.Event()
    contest = asyncio.create_task(busy(locks(redis, make_client()), begun, stop))
    await asyncio.wait_for(begun.wait(), 5)
    poller = make_client().lock(NAME, timeout=30, sleep=0.1)
    turns: list[float] = []
    for _ in range(4):  # on a busy machine one of them may come too late for its gap
        async with Timed() as took:
            assert await asyncio.wait_for(poller.acquire(), 20)
        await poller.release()
        turns.append(took.waited)
        if turns[-1] < 2:
            break
    stop.set()
    entered = await asyncio.wait_for(contest, 10)
    assert min(turns) < 2
    assert entered > 20
    assert await redis.exists(NAME, f"{{{NAME}}}:queue") == 0


async def test_a_lock_that_is_seldom_contended_is_handed_over_immediately(
    redis: Redis, make_client: MakeClient
) -> None:
    """It is left free only where it was handed over without a break: a release without waiters ends that."""
    mine, theirs = (client.lock(NAME, timeout=30, lock_class=Lock) for client in (redis, make_client()))

    await mine.acquire()
    waiter = asyncio.create_task(theirs.acquire())
    await waiting(AsyncLock(redis, NAME))
    await mine.release()
    assert await redis.exists(NAME), "it has a holder"
    assert await redis.exists(f"{{{NAME}}}:polls"), "since when it was handed over"
    assert await asyncio.wait_for(waiter, SOON)
    await theirs.release()
    assert not await redis.exists(NAME, f"{{{NAME}}}:polls")


async def test_while_it_is_left_free_for_others_our_own_wait(
    redis: Redis, sync: Coordinator, other: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: our tasks keep their order, and no waiter is counted twice."""
    monkeypatch.setattr("redis_sync_aio.compat.GAP_MS", 1500)
    lock, held = sync.lock(NAME), redis.lock(NAME, timeout=30, lock_class=Lock)
    await held.acquire()
    waiter = asyncio.create_task(other.lock(NAME).acquire())
    await waiting(lock)
    await redis.zadd(f"{{{NAME}}}:polls", {POLLERS_TICKET: 1})
    await held.release()
    assert not await redis.exists(NAME)
    assert await lock.try_acquire() is None
    found = await lock.statistics()
    assert (bool(found.held), found.waiting, len(tokens(found.waiters))) == (False, 1, 1)
    async with Timed() as took:
        lease = await asyncio.wait_for(waiter, 5)
    assert took.seconds > 0.5
    await lease.release()


async def test_tasks_that_share_notice_that_what_their_process_holds_is_gone(redis: Redis, sync: Coordinator) -> None:
    """They wait behind a task of their own process, without a ticket: its lease is looked at for them."""

    async def notice(lock: Any) -> None:
        lease = await lock.acquire()
        waiter = asyncio.create_task(lock.acquire())
        await waiting(lock)
        await redis.delete(lock.name, *permit_keys(lock.name.encode(), "sem").all[:2])
        taken = await asyncio.wait_for(waiter, 4)
        assert lease.lost
        await taken.release()

    async with asyncio.TaskGroup() as kinds:
        kinds.create_task(notice(AsyncLock(sync, "lock", share=True)))
        kinds.create_task(notice(AsyncSemaphore(sync, "semaphore", limit=1, share=True)))
