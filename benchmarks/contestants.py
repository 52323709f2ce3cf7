"""The contestants."""

from __future__ import annotations

import asyncio
import importlib
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import redis
from redis.asyncio.lock import Lock as RedisPyLock

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, Lease, transaction, wait_until
from redis_sync_aio.types import Transaction

from .contestant import CONNECTIONS, Contestant, Grip, OnClient
from .market import ByLock, ByTransaction, ByWatch, Market
from .raw import MultiplexedConnection, RawConnection, RawLock, RawProtocol, RawSemaphores
from .semaphore_peers import AsyncRedisRateLimiters, PyRedisSemaphore, SelfLimiters, SortedSet, Steindamm
from .server_stats import Sends


class Ours(OnClient):
    name = "ours"
    about = "redis_sync_aio: AsyncLock, AsyncSemaphore, AsyncReadWriteLock, transaction; one Coordinator per process"
    kind = "ours"
    plays = frozenset(
        {"locks", "semaphores", "own semaphores", "readers and writers", "market", "transactions", "guarded commits"}
    )
    sends = Sends(("evalsha", "eval", "ping"), {})
    sharing: ClassVar[Mapping[str, Any]] = {}
    """The sharing options of its locks, semaphores and read/write locks."""
    release: ClassVar[Callable[[Any], Any]] = Lease.release

    async def open(self) -> None:
        await super().open()
        self._coordinator = self.coordinate()

    def coordinate(self) -> Coordinator:
        """Return the coordinator of this process."""
        return Coordinator(self.client)

    async def close(self) -> None:
        await self._coordinator.aclose()
        await super().close()

    def grip(self, key: str) -> Grip:
        return Grip(AsyncLock(self._coordinator, key, ttl=self.ttl, **self.sharing).acquire, type(self).release)

    def permit(self, key: str, limit: int) -> Grip:
        semaphore = AsyncSemaphore(self._coordinator, key, limit=limit, ttl=self.ttl, **self.sharing)
        return Grip(semaphore.acquire, type(self).release)

    def side(self, key: str, write: bool) -> Grip:
        both = AsyncReadWriteLock(self._coordinator, key, ttl=self.ttl, **self.sharing)
        return Grip((both.write() if write else both.read()).acquire, type(self).release)

    def market(self) -> Market:
        return ByTransaction(self.client, self._coordinator, fine=True)

    def adder(self, key: str) -> Callable[[], Awaitable[Any]]:
        async def body(tx: Transaction) -> None:
            number = int(await tx.get(key) or 0)
            tx.multi()
            tx.set(key, number + 1)

        return lambda: transaction(self._coordinator, body, key)

    @asynccontextmanager
    async def writer(self, key: str) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
        async with AsyncLock(self._coordinator, f"lock:{key}", ttl=self.ttl) as lease:

            async def write(number: int) -> None:
                async with lease.transaction() as tx:
                    tx.multi()
                    tx.set(key, number)

            yield write


class OursShared(Ours):
    """Tasks of the process hand a lease over, as long as no other process waits too long for it."""

    name = "ours-shared"
    about = "redis_sync_aio with share=True: the tasks of a process hand its lease over"
    plays = frozenset({"locks", "semaphores", "own semaphores", "readers and writers"})
    quick: ClassVar[frozenset[str] | None] = frozenset({"s3", "s3work", "s3one", "s5", "rw"})
    sharing: ClassVar[Mapping[str, Any]] = {"share": True}
    release: ClassVar[Callable[[Any], Any]] = operator.methodcaller("release")  # a shared lease has another class


class OursLingering(OursShared):
    """As `OursShared`; the process also keeps the lease for a moment when no task holds it."""

    name = "ours-lingering"
    about = "redis_sync_aio with share=True, linger=0.005"
    quick: ClassVar[frozenset[str] | None] = frozenset({"s1", "s2", "s2sem"})
    sharing: ClassVar[Mapping[str, Any]] = {"share": True, "linger": 0.005}

    async def come_to_rest(self) -> None:
        await wait_until(lambda: not self._coordinator._binding.hub().resources, timeout=1)


class OursAsLock(Ours):
    """The plain lock in place of a read/write lock, to show what readers gain by not excluding each other."""

    name = "ours-lock"
    about = "redis_sync_aio.AsyncLock in place of a read/write lock"
    plays = frozenset({"readers and writers"})

    def side(self, key: str, write: bool) -> Grip:
        return self.grip(key)


class CoarseTransaction(Ours):
    """Watches the whole market, as the textbooks do."""

    name = "ours-coarse"
    about = "redis_sync_aio.transaction(escalate_after=3) on the key of the whole market"
    plays = frozenset({"market"})

    def market(self) -> Market:
        return ByTransaction(self.client, self._coordinator, fine=False)


class CoarseLock(Ours):
    """One lock for the whole market."""

    name = "coarse-lock"
    about = "redis_sync_aio.AsyncLock over the whole market"
    plays = frozenset({"market"})

    def market(self) -> Market:
        lock = AsyncLock(self._coordinator, "lock:market", ttl=self.ttl)
        return ByLock(self.client, lambda goods: lock.acquire())


class FineLock(Ours):
    """A lock for each item: purchases of different items do not wait for each other."""

    name = "fine-lock"
    about = "redis_sync_aio.AsyncLock, one for each item"
    plays = frozenset({"market"})

    def market(self) -> Market:
        return ByLock(self.client, lambda goods: AsyncLock(self._coordinator, f"lock:{goods}", ttl=self.ttl))


class RedisPy(OnClient):
    name = "redis-py"
    about = "redis.asyncio.lock.Lock, sleep=0.1, which does not renew; its pipeline with WATCH"
    plays = frozenset({"locks", "own semaphores", "market", "transactions", "guarded commits"})

    def market(self) -> Market:
        return ByWatch(self.client, fine=False)

    def adder(self, key: str) -> Callable[[], Awaitable[Any]]:
        async def body(pipe: Any) -> None:
            number = int(await pipe.get(key) or 0)
            pipe.multi()
            pipe.set(key, number + 1)

        client: Any = self.client
        return lambda: client.transaction(body, key)

    @asynccontextmanager
    async def writer(self, key: str) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
        client: Any = self.client

        async def write(number: int) -> None:
            async with client.pipeline(transaction=True) as pipe:
                pipe.set(key, number)
                await pipe.execute()

        yield write

    def grip(self, key: str) -> Grip:
        lock = RedisPyLock(self.client, key, timeout=self.ttl, sleep=0.1)
        return Grip(lock.acquire, lambda _: lock.release())

    def permit(self, key: str, limit: int) -> Grip:
        return self.grip(key)  # it has no semaphore: use its lock, to compare uncontended pairs


class _FifoLock(Protocol):
    async def acquire(self) -> object: ...
    async def release(self, lease: object) -> None: ...


class FineWatch(RedisPy):
    """Watches the offer that it buys, not the whole market."""

    name = "redis-py-fine"
    about = "redis-py's pipeline with WATCH on the keys of one offer"
    plays = frozenset({"market"})

    def market(self) -> Market:
        return ByWatch(self.client, fine=True)


class FifoLock(OnClient):
    name = "redis-fifo-lock"
    about = "redis_fifo_lock.FifoLock"
    module = "redis_fifo_lock"
    sends = Sends(("evalsha", "eval", "blpop", "config|get"), {})

    def grip(self, key: str) -> Grip:
        make = cast("Callable[..., _FifoLock]", importlib.import_module("redis_fifo_lock").FifoLock)
        lease_ms = int(self.ttl * 1000)
        lock = make(self.client, key, lease_ms=lease_ms)
        return Grip(lock.acquire, lock.release)

    def holder_key(self, key: str) -> str:
        return f"{{{key}}}:h"


class _ThreadLock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


class PythonRedisLock(Contestant):
    """It has no asyncio interface, so each of its tasks is a thread that may block, as it was designed for."""

    name = "python-redis-lock"
    about = "redis_lock.Lock; synchronous: a thread per task, on one redis.Redis per process"
    module = "redis_lock"
    threads = True
    sends = Sends(("get", "set", "blpop", "evalsha", "eval"), {"get": 1})

    async def open(self) -> None:
        self._client = redis.Redis.from_url(self.url, max_connections=CONNECTIONS)

    async def close(self) -> None:
        self._client.close()

    def grip(self, key: str) -> Grip:
        make = cast("Callable[..., _ThreadLock]", importlib.import_module("redis_lock").Lock)
        lock = make(self._client, key, expire=int(self.ttl), auto_renewal=self.renew)

        async def acquire() -> None:
            lock.acquire()

        async def release(_: object) -> None:
            lock.release()

        return Grip(acquire, release)

    def holder_key(self, key: str) -> str:
        return f"lock:{key}"


class RawClient(OnClient):
    name = "raw-client"
    about = "limit: SET NX PX + EVALSHA compare-and-delete through redis.asyncio.Redis"
    kind = "raw"

    def grip(self, key: str) -> Grip:
        lock = RawLock(self._command, key, self.ttl)
        return Grip(lock.acquire, lock.release)

    async def _command(self, *words: bytes | int) -> Any:
        client: Any = self.client
        return await client.execute_command(*words)


class _OnOneConnection(Contestant):
    kind = "raw"
    protocol: ClassVar[type[MultiplexedConnection | RawProtocol]]

    async def open(self) -> None:
        self._connection: RawConnection = await self.protocol.open(self.url)

    async def close(self) -> None:
        await self._connection.close()

    def grip(self, key: str) -> Grip:
        lock = RawLock(self._connection.command, key, self.ttl)
        return Grip(lock.acquire, lock.release)


class RawOneConnection(_OnOneConnection):
    name = "raw-connection"
    about = "limit: the same over ONE redis.asyncio Connection, multiplexed, one write per loop turn"
    protocol = MultiplexedConnection


class RawOneProtocol(_OnOneConnection):
    name = "raw-protocol"
    about = "limit: the same over a bare asyncio protocol and hiredis, one connection, one write per loop turn"
    protocol = RawProtocol


class RawSemaphore(Contestant):
    name = "raw-semaphore"
    about = "limit: a counter, a list and PUBLISH over a bare protocol; no leases, no fences"
    kind = "raw"
    plays = frozenset({"semaphores"})
    sends = Sends(("evalsha",), {})

    async def open(self) -> None:
        self._semaphores = await RawSemaphores.open(self.url)

    async def close(self) -> None:
        await self._semaphores.close()

    def permit(self, key: str, limit: int) -> Grip:
        name = key.encode()
        return Grip(partial(self._semaphores.acquire, name, limit), lambda _: self._semaphores.release(name))


class AsyncioLock(Contestant):
    name = "asyncio-lock"
    about = "in-process limit: asyncio.Lock"
    kind = "in-process"

    async def open(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    def grip(self, key: str) -> Grip:
        lock = self._locks.setdefault(key, asyncio.Lock())

        async def release(_: object) -> None:
            lock.release()

        return Grip(lock.acquire, release)


class Hop(Contestant):
    name = "hop"
    about = "limit: PUBLISH in one process to push in another, bare protocol"
    kind = "hop"


class NoLock(OnClient):
    """No exclusion at all; proves that the benchmarks would notice."""

    name = "no-lock"
    about = "excludes nobody"
    kind = "broken"
    plays = frozenset({"locks", "semaphores", "own semaphores", "readers and writers", "market"})

    def grip(self, key: str) -> Grip:
        async def nothing(*_: object) -> None:
            await asyncio.sleep(0)

        return Grip(nothing, nothing)

    def market(self) -> Market:
        return ByLock(self.client, lambda goods: nullcontext())

    def permit(self, key: str, limit: int) -> Grip:
        return self.grip(key)

    def side(self, key: str, write: bool) -> Grip:
        return self.grip(key)


ALL: tuple[type[Contestant], ...] = (
    Ours, OursShared, OursLingering, OursAsLock, CoarseTransaction, CoarseLock, FineLock,
    RedisPy, FineWatch, FifoLock, PythonRedisLock,
    RawClient, RawOneConnection, RawOneProtocol, RawSemaphore, AsyncioLock, Hop,
    SelfLimiters, AsyncRedisRateLimiters, PyRedisSemaphore, Steindamm, SortedSet, NoLock,
)  # fmt: skip
BY_NAME = {contestant.name: contestant for contestant in ALL}
