"""P5 for transactions: cancelled at any await they write all or nothing; no connection leaks, or stays watching (E8).

The client has a pool of two connections, so a single leak is felt soon. What is swept: every suspension point, in
three ways (tests/support/sweep.py), and every turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, transaction, wait_until, watch_retry
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import turn_key
from ..support.sweep import Outcome, sweep
from ..support.transactions import in_use, watchers

injected: Counter[str] = Counter()


class Field:
    """A client with a pool of two, a foreign one, and two keys that are always written together."""

    def __init__(self, redis: Redis, foreign: Redis) -> None:
        self.redis, self.foreign = redis, foreign
        self.interrupt = 0

    async def both(self, tx: Transaction) -> int:
        count = int(await tx.get("a") or 0)
        if self.interrupt:
            self.interrupt -= 1
            # In a task of its own: on Python < 3.12 redis-py would swallow our cancellation.
            await asyncio.wait([asyncio.ensure_future(self.foreign.incr("version"))])
        await tx.mget("b", "c")
        tx.multi()
        tx.set("a", count + 1)
        tx.set("b", count + 1)
        return count

    async def check(self) -> None:
        """Nothing is left anywhere, and both connections of the pool are good."""

        async def at_rest() -> bool:
            return in_use(self.redis) == 0 and await watchers(self.foreign) == 0

        await wait_until(at_rest, FAST, timeout=15)
        first, second = await self.foreign.mget("a", "b")
        assert first == second, "half of a transaction was written"
        await asyncio.gather(self.redis.echo("x"), self.redis.echo("y"))
        assert len(self.redis.connection_pool._available_connections) <= 2


KEYS = ("a", "b", "version")


async def plain(field: Field) -> None:
    await transaction(field.redis, field.both, *KEYS)


async def after_a_conflict(field: Field) -> None:
    field.interrupt = 1
    await transaction(field.redis, field.both, *KEYS)


async def with_a_body_that_fails(field: Field) -> None:
    async def body(tx: Transaction) -> None:
        await field.both(tx)
        raise KeyError

    with pytest.raises(KeyError):
        await transaction(field.redis, body, *KEYS)
    await asyncio.sleep(0)  # P7: the body's error came first, a cancellation meanwhile stays due
    await asyncio.sleep(0)


async def in_a_loop(field: Field) -> None:
    field.interrupt = 1
    async for attempt in watch_retry(field.redis, *KEYS):
        async with attempt as tx:
            await field.both(tx)


async def exactly_once(field: Field) -> None:
    await transaction(field.redis, field.both, *KEYS, exactly_once=True)


async def on_new_connections(field: Field) -> None:
    await field.redis.connection_pool.disconnect()
    await transaction(field.redis, field.both, *KEYS)


async def guarded(field: Field) -> None:
    async with AsyncLock(field.redis, "guard") as lease, lease.transaction() as tx:
        await field.both(tx)


Operation = Callable[[Field], Awaitable[None]]
OPERATIONS: tuple[Operation, ...] = (
    plain,
    after_a_conflict,
    with_a_body_that_fails,
    in_a_loop,
    exactly_once,
    on_new_connections,
    guarded,
)


@pytest.fixture
def field(make_client: MakeClient, redis: Redis) -> Field:
    return Field(make_client(max_connections=2), redis)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda it: it.__name__)
async def test_cancelled_at_every_suspension_point(field: Field, operation: Operation) -> None:
    async def check(outcome: Outcome[None]) -> None:
        await field.check()

    result = await sweep(lambda: _run(operation, field), check)
    assert not result.swallowed
    injected[operation.__name__] += sum(result.cancellations.values())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda it: it.__name__)
async def test_cancelled_twice(field: Field, operation: Operation) -> None:
    async def check(outcome: Outcome[None]) -> None:
        await field.check()

    result = await sweep(lambda: _run(operation, field), check, ways=("task", "same_turn"), twice=True)
    assert not result.swallowed
    injected[operation.__name__] += sum(result.cancellations.values())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda it: it.__name__)
async def test_cancelled_after_so_many_turns_of_the_loop(field: Field, operation: Operation) -> None:
    for turns in range(30):
        task = asyncio.create_task(_run(operation, field))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            await task
            break
        injected[operation.__name__] += 1
        await asyncio.wait([task])
        assert task.cancelled(), f"after {turns} turns: {task}"
        await field.check()


async def test_cancelled_between_two_commands(field: Field) -> None:
    """Its connection does not go back watching."""

    async def waits(tx: Transaction) -> None:
        await tx.get("a")
        await asyncio.sleep(60)

    running = asyncio.create_task(transaction(field.redis, waits, "a"))
    await asyncio.sleep(1)
    assert await watchers(field.foreign) == 1
    running.cancel()
    await asyncio.wait([running])
    await field.check()


async def test_cancelled_while_it_waits_for_its_turn(field: Field) -> None:
    """The one that has the turn keeps it; a waiter for it is cancelled, and leaves nothing."""
    async with Coordinator(field.foreign) as sync:
        name = turn_key(b"a")
        async with AsyncLock(sync, name) as lease:
            for _ in range(5):
                task = asyncio.create_task(transaction(field.redis, field.both, "a", escalate_after=1))
                await wait_until(lambda: _waiters(sync, name, 1), FAST, timeout=15)
                assert in_use(field.redis) == 0  # it keeps no connection from the one whose turn it is
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                await wait_until(lambda: _waiters(sync, name, 0), FAST, timeout=15)
            lease.check()
        await field.check()
        assert (await transaction(field.redis, field.both, "a", escalate_after=1)).value == 0


async def _waiters(sync: Coordinator, name: bytes, count: int) -> bool:
    return (await AsyncLock(sync, name).statistics()).waiting == count


async def _run(operation: Operation, field: Field) -> None:
    await operation(field)


async def test_a_cancellation_that_redis_py_swallows_is_noticed(field: Field) -> None:
    """On Python < 3.12: cancelled in each turn around each reply, no command of the body runs after it."""
    for turns in range(40):
        went_on: list[Any] = []

        async def body(tx: Transaction, went_on: list[Any] = went_on) -> None:
            for _ in range(6):
                await tx.get("a")
                task = asyncio.current_task()
                assert task is not None
                if task.cancelling():
                    went_on.append("after a cancellation")
            tx.multi()

        task = asyncio.create_task(transaction(field.redis, body, "a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            break
        await asyncio.wait([task])
        assert task.cancelled()
        assert not went_on
        injected["reads"] += 1
    await field.check()
