"""Locks, semaphores and transactions as books and blogs show them, on plain redis-py: what ours are compared with.

Each is right as long as nothing happens between two of its commands. ``gap`` is called where something can: there a
test lets a lease end, a rival come, or this process die (`crash`). Clocks are arguments, so those of two clients may be
apart. A client here has ``decode_responses=True``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from .factories import Client

Gap = Callable[[], Awaitable[object]]
Clock = Callable[[], float]


class Crash(Exception):
    """The process is gone: a test that catches it does nothing more in its name."""


async def nothing() -> None:
    """An empty gap."""


async def crash() -> None:
    """A gap in which the process dies."""
    raise Crash


# -- locks -------------------------------------------------------------------------------------------------


async def take(
    client: Client, name: str, who: str = "1", *, ex: int | timedelta | None = None, px: int | timedelta | None = None
) -> bool:
    """SET NX, with a ttl in seconds (EX) or milliseconds (PX)."""
    return bool(await client.set(name, who, nx=True, ex=ex, px=px))


async def give_back(client: Client, name: str) -> None:
    """DEL, whichever process holds it."""
    await client.delete(name)


async def give_back_if_mine(client: Client, name: str, who: str, gap: Gap = nothing) -> bool:
    """GET, and DEL if it says ``who``."""
    if await client.get(name) != who:
        return False
    await gap()
    await client.delete(name)
    return True


async def take_majority(clients: Sequence[Client], name: str, who: str, px: int = 10_000, gap: Gap = nothing) -> bool:
    """Redlock: SET NX on each server, one after the other; what it got is given back if that is no majority."""
    got = []
    for client in clients:
        if await take(client, name, who, px=px):
            got.append(client)
        await gap()
    if len(got) > len(clients) // 2:
        return True
    await give_back_everywhere(got, name, who)
    return False


async def give_back_everywhere(clients: Sequence[Client], name: str, who: str) -> None:
    """Give back what ``who`` holds on these servers."""
    for client in clients:
        await give_back_if_mine(client, name, who)


async def give_back_watching(client: Client, name: str, who: str, gap: Gap = nothing) -> bool:
    """The same under WATCH; WatchError if the key was touched meanwhile."""
    async with client.pipeline() as pipe:
        await pipe.watch(name)
        if await pipe.get(name) != who:
            return False
        await gap()
        pipe.multi()
        pipe.delete(name)
        await pipe.execute()
        return True


async def take_in_two_steps(
    client: Client, name: str, who: str, seconds: int, gap: Gap = nothing, *, mend: bool = False
) -> bool:
    """SETNX, then EXPIRE; with ``mend`` a lock that has no ttl is given one, since its holder may have died between."""
    if await client.setnx(name, who):
        await gap()
        await client.expire(name, seconds)
        return True
    if mend and await client.ttl(name) == -1:
        await client.expire(name, seconds)
    return False


async def take_and_ask(client: Client, name: str, who: str, px: int) -> bool:
    """SET NX; if the reply is lost, GET tells who has it."""
    try:
        return await take(client, name, who, px=px)
    except RedisError:
        return bool(await client.get(name) == who)


class LockAcquireError(Exception):
    """The alarm rang before the lock was free."""


class LockReleaseError(Exception):
    """Somebody else holds it."""


_TAKE = """
if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 then return 0 end
return redis.call('EXPIRE', KEYS[1], ARGV[2])
"""
_GIVE_BACK = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"


class AlarmLock:
    """Scripts that take and give back; an alarm of the process ends the waiting by an exception in the handler."""

    def __init__(self, client: Client, name: str, who: str, seconds: int, timer: int, alarm: signal.Signals) -> None:
        self.client, self.name, self.who, self.seconds = client, name, who, seconds
        self.timer, self.alarm = timer, alarm

    async def acquire(self, timeout: float, waiting: Gap) -> None:
        """Try again and again, ``waiting`` in between, until the alarm rings."""
        with self._alarm(timeout):
            while not await self.client.eval(_TAKE, 1, self.name, self.who, self.seconds):
                await waiting()

    async def release(self) -> None:
        if not await self.client.eval(_GIVE_BACK, 1, self.name, self.who):
            raise LockReleaseError(self.name)

    @contextmanager
    def _alarm(self, timeout: float) -> Iterator[None]:
        def ring(*_: object) -> None:
            raise LockAcquireError(self.name)

        before = signal.signal(self.alarm, ring)
        signal.setitimer(self.timer, timeout)
        try:
            yield
        finally:
            signal.setitimer(self.timer, 0)
            signal.signal(self.alarm, before)


# -- semaphores --------------------------------------------------------------------------------------------


class NamedSemaphore:
    """A set of the holders' names next to a key with their greatest number."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name

    async def set_max(self, limit: int) -> None:
        await self.client.set(f"{self.name}:max", limit)

    async def acquire(self, who: str, gap: Gap = nothing) -> bool:
        limit: Any = await self.client.get(f"{self.name}:max")
        if await self.client.scard(self.name) >= int(limit):
            return False
        await gap()
        await self.client.sadd(self.name, who)
        return True

    async def release(self, who: str) -> bool:
        return bool(await self.client.srem(self.name, who))

    async def size(self) -> int:
        return int(await self.client.scard(self.name))


async def take_some(client: Client, name: str, weight: int, limit: int, gap: Gap = nothing) -> bool:
    """INCRBY; if that is too much, DECRBY."""
    if await client.incrby(name, weight) <= limit:
        return True
    await gap()
    await client.decrby(name, weight)
    return False


class ClockSemaphore:
    """A sorted set of holders and their time of arrival, by each client's own clock; the first ``limit`` are in."""

    def __init__(self, client: Client, name: str, limit: int, timeout: float) -> None:
        self.client, self.name, self.limit, self.timeout = client, name, limit, timeout

    async def acquire(self, who: str, clock: Clock) -> bool:
        now = clock()
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(self.name, "-inf", now - self.timeout)
            pipe.zadd(self.name, {who: now})
            pipe.zrank(self.name, who)
            rank = (await pipe.execute())[-1]
        if rank < self.limit:
            return True
        await self.client.zrem(self.name, who)
        return False

    async def release(self, who: str) -> bool:
        return bool(await self.client.zrem(self.name, who))

    async def refresh(self, who: str, clock: Clock) -> bool:
        """Set the time of ``who`` to now; False: it was not there any more."""
        if await self.client.zadd(self.name, {who: clock()}):
            await self.release(who)
            return False
        return True

    async def holders(self) -> set[str]:
        return set(await self.client.zrange(self.name, 0, -1))


class FairSemaphore(ClockSemaphore):
    """Next to the times a set of owners, in the order of a counter: the clocks do not decide who is first."""

    async def acquire(self, who: str, clock: Clock, gap: Gap = nothing) -> bool:
        owners, now = f"{self.name}:owners", clock()
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(self.name, "-inf", now - self.timeout)
            pipe.zinterstore(owners, {owners: 1, self.name: 0})
            pipe.incr(f"{self.name}:counter")
            counter = (await pipe.execute())[-1]
        await gap()
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.zadd(self.name, {who: now})
            pipe.zadd(owners, {who: counter})
            pipe.zrank(owners, who)
            rank = (await pipe.execute())[-1]
        if rank < self.limit:
            return True
        await self.release(who)
        return False

    async def release(self, who: str) -> bool:
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.zrem(self.name, who)
            pipe.zrem(f"{self.name}:owners", who)
            return bool((await pipe.execute())[0])


class LockedFairSemaphore(FairSemaphore):
    """The same with a lock around it: only the holder of the lock counts and ranks."""

    async def acquire(self, who: str, clock: Clock, gap: Gap = nothing) -> bool:
        lock = f"{self.name}:lock"
        if not await take(self.client, lock, who, px=1000):
            return False
        try:
            return await super().acquire(who, clock, gap)
        finally:
            await give_back_if_mine(self.client, lock, who)


# -- transactions ------------------------------------------------------------------------------------------


class Insufficient(Exception):
    """There are fewer in stock than were asked for."""


async def add_one(client: Client, key: str, gap: Gap = nothing) -> int:
    """GET, then SET."""
    new = int(await client.get(key) or 0) + 1
    await gap()
    await client.set(key, new)
    return new


async def add_one_watching(client: Client, key: str, gap: Gap = nothing) -> int:
    """The same under WATCH, again and again until nobody came between; return how often it tried."""
    tries = 0
    async with client.pipeline() as pipe:
        while True:
            tries += 1
            try:
                await pipe.watch(key)
                old = int(await pipe.get(key) or 0)
                await gap()
                pipe.multi()
                pipe.set(key, old + 1)
                await pipe.execute()
                return tries
            except WatchError:
                continue


async def deduct_under_lock(client: Client, item: str, count: int, who: str) -> int:
    """Take the lock of the stock, look, write under WATCH, give the lock back; return what is left."""
    lock = f"lock:{item}"
    while not await take(client, lock, who, px=10_000):
        await asyncio.sleep(0.001)
    async with client.pipeline() as pipe:
        await pipe.watch(item)
        left = int(await pipe.get(item) or 0) - count
        if left < 0:
            raise Insufficient(f"{count} of {item} were asked for, {left + count} are left")
        pipe.multi()
        pipe.set(item, left)
        await pipe.execute()
    await give_back_if_mine(client, lock, who)
    return left


def decoded(client: Redis) -> Client:
    """Return the client without its annotations, which differ from version to version of redis-py."""
    return client
