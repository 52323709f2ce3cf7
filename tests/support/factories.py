"""What the conformance suite needs to know of a kind of primitive: how to make one that excludes everybody else,
and how to reach behind it on the server, where tests look at what is held, take it away, or spoil it.

A test that asks for the fixture ``kind`` runs for every kind. A test that does not is about something that only
locks have, and says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, AsyncSemaphore, Backoff, Coordinator, wait_until
from redis_sync_aio.errors import LossReason

from .inside import Engine, Keys, Script, load, lock_keys, permit_keys
from .views import holder_of

Exclusive: TypeAlias = AsyncLock | AsyncRobustLock | AsyncSemaphore
Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""

Part = Literal["acquire", "release", "renew"]
PARTS: tuple[Part, ...] = ("acquire", "release", "renew")


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of primitive that lets one in at a time."""

    label: str
    prefix: str
    """Of its scripts."""
    taken: LossReason
    """What a holder learns when `take_over` took its place."""
    engine: Engine = "auto"
    share: bool = False
    linger: float = 0.0

    def __str__(self) -> str:
        return self.label

    @abstractmethod
    def make(self, sync: Coordinator | Redis, name: str | bytes, **options: Any) -> Exclusive:
        """Return a primitive of this kind; ``options`` are those that all kinds have."""

    @abstractmethod
    def keys(self, name: str) -> Keys:
        """Return its keys."""

    @abstractmethod
    async def token(self, redis: Client, name: str) -> bytes | None:
        """Return who holds it, as the server has it; None when nobody does."""

    @abstractmethod
    async def left_ms(self, redis: Client, name: str) -> int:
        """Return for how many milliseconds it is held, 0 when it is not."""

    @abstractmethod
    async def vanish(self, redis: Client, name: str) -> None:
        """Delete what says who holds it, as another client or an eviction would."""

    @abstractmethod
    async def take_over(self, redis: Client, name: str) -> None:
        """Let ``other`` hold it for a minute, in the place of the present holder."""

    def script(self, part: Part) -> Script:
        """Return one of its scripts."""
        return load(self.prefix + part)

    def key(self, name: str) -> bytes:
        """Return the key that tells who holds it."""
        return self.keys(name).all[0]

    @abstractmethod
    def queue(self, name: str) -> bytes:
        """Return the key of its queue."""

    def polls(self, name: str) -> bytes:
        """Return the key of its polled-for tickets."""
        return self.keys(name).all[3]

    async def held(self, redis: Client, name: str) -> bool:
        """Return whether anybody holds it."""
        return await self.token(redis, name) is not None

    async def empty(self, redis: Client, name: str) -> bool:
        """Return whether nobody holds it and nobody is queued."""
        queued = await redis.exists(self.queue(name), self.polls(name))
        return not queued and not await self.held(redis, name)

    async def spoil(self, redis: Client, name: str) -> None:
        """Put a key of a foreign type in its place."""
        await redis.delete(self.key(name))
        await redis.hset(self.key(name), "a", "hash")

    async def spoiled(self, redis: Client, name: str) -> bool:
        """Return whether that is still there."""
        return bool(await redis.hget(self.key(name), "a"))


class LockKind(Kind):
    """`AsyncLock`."""

    def make(self, sync: Coordinator | Redis, name: str | bytes, **options: Any) -> AsyncLock:
        given = {"engine": self.engine, "share": self.share, "linger": self.linger}
        return AsyncLock(sync, name, **{**given, **options})

    def keys(self, name: str) -> Keys:
        return lock_keys(name.encode()).by(self.engine)

    def queue(self, name: str) -> bytes:
        return self.keys(name).all[1]

    async def token(self, redis: Client, name: str) -> bytes | None:
        found: bytes | str | None = await redis.get(name)
        if found is not None and self.linger:  # nobody has it any more, perhaps
            found = await _unless_it_goes(redis, name, 10 * self.linger)
        return found.encode() if isinstance(found, str) else found

    async def left_ms(self, redis: Client, name: str) -> int:
        return max(0, int(await redis.pttl(name)))

    async def vanish(self, redis: Client, name: str) -> None:
        await redis.delete(name)

    async def take_over(self, redis: Client, name: str) -> None:
        await redis.set(name, "other", px=60_000)


@dataclass(frozen=True)
class SemaphoreKind(Kind):
    """`AsyncSemaphore`; of one permit, unless a test is about more."""

    limit: int = 1

    def __str__(self) -> str:
        return self.label

    def make(self, sync: Coordinator | Redis, name: str | bytes, **options: Any) -> AsyncSemaphore:
        given = {"engine": self.engine, "share": self.share, "linger": self.linger}
        return AsyncSemaphore(sync, name, limit=self.limit, **{**given, **options})

    def keys(self, name: str) -> Keys:
        return permit_keys(name.encode(), "sem").by(self.engine)

    def queue(self, name: str) -> bytes:
        return self.keys(name).all[2]

    async def permits(self, redis: Client, name: str) -> list[tuple[bytes, float]]:
        """Return tokens and milliseconds left; tombstones of undone requests (weight 0) are none."""
        found = []
        permits = await redis.zrange(self.key(name), 0, -1, withscores=True)
        now = await _server_us(redis)  # afterwards: a renewal in between would seem to last longer than it does
        for token, until in permits:
            token = token.encode() if isinstance(token, str) else token
            about = await redis.hget(self.keys(name).all[1], b"=" + token) or b"0"
            if until > now and int(about.split()[0]):
                found.append((token, (until - now) / 1000))
        return found

    async def token(self, redis: Client, name: str) -> bytes | None:
        found = await self.permits(redis, name)
        assert len(found) <= 1, found
        return found[0][0] if found else None

    async def left_ms(self, redis: Client, name: str) -> int:
        found = await self.permits(redis, name)
        return int(found[0][1]) if found else 0

    async def vanish(self, redis: Client, name: str) -> None:
        await redis.delete(*self.keys(name).all[:2])

    async def take_over(self, redis: Client, name: str) -> None:
        await self.vanish(redis, name)
        words = (b"other", 60_000, b"", 0, b"1", 1, 1)
        await redis.eval(self.script("acquire").source.decode(), 4, *self.keys(name).all, *words)


async def holder(lock: Exclusive) -> str | None:
    """Return who holds it, as it says itself; of one that lingers, who holds it still after that."""
    if lock._linger:
        with suppress(TimeoutError):
            await wait_until(lambda: _unlocked(lock), Backoff(initial=0.001, cap=0.002), timeout=10 * lock._linger)
    found = await lock.statistics()
    assert len(found.holders) == found.held <= 1, found
    return holder_of(found)


async def _unlocked(lock: Exclusive) -> bool:
    return not await lock.locked()


async def _unless_it_goes(redis: Client, name: str, seconds: float) -> bytes | str | None:
    """Return who holds a lock, if it is still held after so long."""
    with suppress(TimeoutError):
        await wait_until(lambda: _free(redis, name), Backoff(initial=0.001, cap=0.002), timeout=seconds)
    return await redis.get(name)  # type: ignore[no-any-return]


async def _free(redis: Client, name: str) -> bool:
    return await redis.get(name) is None


async def _server_us(redis: Client) -> int:
    seconds, micros = await redis.time()
    return int(seconds) * 1_000_000 + int(micros)


LOCK: Kind = LockKind("lock", "lock/", "taken")
SEMAPHORE: Kind = SemaphoreKind("semaphore(1)", "permits/", "expired")  # "taken" needs one key with one owner
WATCHED_LOCK: Kind = LockKind("lock with WATCH", "lock/", "taken", "watch")
WATCHED_SEMAPHORE: Kind = SemaphoreKind("semaphore(1) with WATCH", "permits/", "expired", "watch")
SHARED_LOCK: Kind = LockKind("shared lock", "lock/", "taken", share=True)
LINGERING_LOCK: Kind = LockKind("lingering lock", "lock/", "taken", share=True, linger=0.005)
KINDS = (LOCK, SEMAPHORE)
SHARED_SEMAPHORE: Kind = SemaphoreKind("shared semaphore(1)", "permits/", "expired", share=True)
SHARED = (SHARED_LOCK, LINGERING_LOCK, SHARED_SEMAPHORE)
WATCHED = (WATCHED_LOCK, WATCHED_SEMAPHORE)
