"""Every primitive that can be acquired, a row each: how to make it, what it is, and how to look behind it.

A new primitive is a row here. `PRIMITIVES` are for what all of them promise, and `ALONE` for what is promised by those
that one can have at a time. `KINDS`, with `SHARED` and `WATCHED`, are those that most others are made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Backoff,
    Coordinator,
    wait_until,
)
from redis_sync_aio.errors import LossReason

from .inside import WRITER_WEIGHT, Engine, Keys, Script, load, lock_keys, permit_keys
from .views import holder_of

Exclusive: TypeAlias = AsyncLock | AsyncRobustLock | AsyncSemaphore
Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""
Source: TypeAlias = Coordinator | Redis | Sequence[Coordinator]

Part = Literal["acquire", "release", "renew"]
PARTS: tuple[Part, ...] = ("acquire", "release", "renew")


class Place(ABC):
    """Where a primitive is on the server."""

    scripts: ClassVar[str]
    taken: ClassVar[LossReason]
    """What a holder learns when `take_over` took its place."""
    queue: ClassVar[int]
    """Which of its keys is the queue."""

    @abstractmethod
    def keys(self, name: str) -> Keys:
        """Return its keys. The first says who holds it; the fourth has the tickets that are polled for."""

    @abstractmethod
    async def held(self, redis: Client, name: str) -> list[tuple[bytes, float]]:
        """Return the tokens of the holders, and for how many milliseconds each of them has it."""

    @abstractmethod
    async def vanish(self, redis: Client, name: str) -> None:
        """Delete what says who holds it, as another client or an eviction would."""

    @abstractmethod
    async def take_over(self, redis: Client, name: str) -> None:
        """Let ``other`` hold it for a minute, in the place of the present holder."""


class KeyOfALock(Place):
    """A string key, the name itself."""

    scripts, taken, queue = "lock/", "taken", 1

    def keys(self, name: str) -> Keys:
        return lock_keys(name.encode())

    async def held(self, redis: Client, name: str) -> list[tuple[bytes, float]]:
        token: bytes | str | None = await redis.get(name)
        left = max(0, await redis.pttl(name))
        return [] if token is None else [(_bytes(token), left)]

    async def vanish(self, redis: Client, name: str) -> None:
        await redis.delete(name)

    async def take_over(self, redis: Client, name: str) -> None:
        await redis.set(name, "other", px=60_000)


@dataclass(frozen=True)
class Permits(Place):
    """A sorted set of tokens. "taken" needs one key with one owner, so a loss is always "expired"."""

    kind: str
    weight: int = 1
    scripts, taken, queue = "permits/", "expired", 2

    def keys(self, name: str) -> Keys:
        return permit_keys(name.encode(), self.kind)

    async def held(self, redis: Client, name: str) -> list[tuple[bytes, float]]:
        """Tombstones of undone requests (weight 0) hold nothing."""
        found = []
        permits = await redis.zrange(self.keys(name).all[0], 0, -1, withscores=True)
        seconds, micros = await redis.time()  # afterwards: a renewal in between would seem to last longer than it does
        now = int(seconds) * 1_000_000 + int(micros)
        for token, until in permits:
            about = await redis.hget(self.keys(name).all[1], b"=" + _bytes(token)) or b"0"
            if until > now and int(about.split()[0]):
                found.append((_bytes(token), (until - now) / 1000))
        return found

    async def vanish(self, redis: Client, name: str) -> None:
        await redis.delete(*self.keys(name).all[:2])

    async def take_over(self, redis: Client, name: str) -> None:
        await self.vanish(redis, name)
        words = (b"other", 60_000, b"", 0, self.weight, self.weight, 1)
        await redis.eval(load("permits/acquire").source.decode(), 4, *self.keys(name).all, *words)


@dataclass(frozen=True, eq=False)
class Primitive:
    """A way to acquire something."""

    label: str
    build: Callable[..., Any]
    """Makes it of what a source is, a name, and options that all of them have."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Options that make it what it is."""
    place: Place = field(default_factory=KeyOfALock)
    alone: bool = True
    """Only one can have it at a time."""
    reenters: bool = False
    """The task that has it may acquire it again."""
    servers: int = 1
    """How many servers it needs to outlive the loss of one."""
    variant: bool = False
    """It combines what other rows have: the gate alone runs it."""

    def __str__(self) -> str:
        return self.label

    @property
    def share(self) -> bool:
        """Whether tasks of a process share what it holds."""
        return bool(self.own.get("share"))

    @property
    def linger(self) -> float:
        """Seconds for which a process keeps what its last task released."""
        return float(self.own.get("linger", 0))

    @property
    def taken(self) -> LossReason:
        """What a holder learns when `take_over` took its place."""
        return self.place.taken

    def make(self, source: Source, name: str | bytes = "it", **options: Any) -> Any:
        """Return one."""
        return self.build(source, name, **{**self.own, **options})

    def script(self, part: Part) -> Script:
        """Return one of its scripts."""
        return load(self.place.scripts + part)

    def keys(self, name: str) -> Keys:
        """Return its keys, as it uses them."""
        engine: Engine = self.own.get("engine", "auto")
        return self.place.keys(name).by(engine)

    def key(self, name: str) -> bytes:
        """Return the key that tells who holds it."""
        return self.keys(name).all[0]

    def queue(self, name: str) -> bytes:
        """Return the key of its queue."""
        return self.keys(name).all[self.place.queue]

    def polls(self, name: str) -> bytes:
        """Return the key of its polled-for tickets."""
        return self.keys(name).all[3]

    async def token(self, redis: Client, name: str) -> bytes | None:
        """Return who holds it, as the server has it; None when it is free."""
        found = await self.place.held(redis, name)
        if found and self.linger:  # it is only kept, perhaps
            with suppress(TimeoutError):
                await wait_until(lambda: self._is_free(redis, name), OFTEN, timeout=10 * self.linger)
            found = await self.place.held(redis, name)
        assert len(found) <= 1, found
        return found[0][0] if found else None

    async def _is_free(self, redis: Client, name: str) -> bool:
        return not await self.place.held(redis, name)

    async def left_ms(self, redis: Client, name: str) -> int:
        """Return for how many milliseconds it is held, 0 when it is not."""
        found = await self.place.held(redis, name)
        return int(found[0][1]) if found else 0

    async def held(self, redis: Client, name: str) -> bool:
        """Return whether it has a holder."""
        return await self.token(redis, name) is not None

    async def empty(self, redis: Client, name: str) -> bool:
        """Return whether it has no holder and an empty queue."""
        queued = await redis.exists(self.queue(name), self.polls(name))
        return not queued and not await self.held(redis, name)

    async def vanish(self, redis: Client, name: str) -> None:
        """Delete what says who holds it, as another client or an eviction would."""
        await self.place.vanish(redis, name)

    async def take_over(self, redis: Client, name: str) -> None:
        """Let ``other`` hold it for a minute, in the place of the present holder."""
        await self.place.take_over(redis, name)

    async def spoil(self, redis: Client, name: str) -> None:
        """Put a key of a foreign type in its place."""
        await redis.delete(self.key(name))
        await redis.hset(self.key(name), "a", "hash")

    async def spoiled(self, redis: Client, name: str) -> bool:
        """Return whether that is still there."""
        return bool(await redis.hget(self.key(name), "a"))


OFTEN = Backoff(initial=0.001, cap=0.002)


def _bytes(token: bytes | str) -> bytes:
    return token.encode() if isinstance(token, str) else token


async def holder(lock: Exclusive) -> str | None:
    """Return who holds it, as it says itself; of one that lingers, who holds it still after that."""

    async def free() -> bool:
        return not await lock.locked()

    if lock._linger:
        with suppress(TimeoutError):
            await wait_until(free, OFTEN, timeout=10 * lock._linger)
    found = await lock.statistics()
    assert len(found.holders) == found.held <= 1, found
    return holder_of(found)


def _read(source: Source, name: str, **options: Any) -> Any:
    return AsyncReadWriteLock(source, name, **options).read()  # type: ignore[arg-type]


def _write(source: Source, name: str, **options: Any) -> Any:
    return AsyncReadWriteLock(source, name, **options).write()  # type: ignore[arg-type]


def _several(source: Source, name: str, **options: Any) -> Any:
    return AsyncMultiLock(source, [name, f"{name} and that"], **options)  # type: ignore[arg-type]


def _in_one_slot(source: Source, name: str, **options: Any) -> Any:
    return AsyncMultiLock(source, [name, f"{{{name}}} and that"], **options)  # type: ignore[arg-type]


def _redlock(source: Any, name: str, **options: Any) -> Any:
    return AsyncRedlock(source if isinstance(source, Sequence) else [source], name, **options)


WATCH, SHARE = {"engine": "watch"}, {"share": True}
ONE, FOUR = {"limit": 1}, {"limit": 4}
SEM = Permits("sem")

LOCK = Primitive("lock", AsyncLock)
WATCHED_LOCK = Primitive("lock with WATCH", AsyncLock, WATCH, variant=True)
SHARED_LOCK = Primitive("shared lock", AsyncLock, SHARE)
LINGERING_LOCK = Primitive("lingering lock", AsyncLock, {**SHARE, "linger": 0.005})
ROBUST = Primitive("robust lock", AsyncRobustLock)
REENTRANT = Primitive("reentrant lock", AsyncReentrantLock, reenters=True)
MULTI = Primitive("multi-lock", _several)
MULTI_IN_ONE_SLOT = Primitive("multi-lock in one slot", _in_one_slot, variant=True)
REDLOCK = Primitive("redlock", _redlock, servers=3)
WRITER = Primitive("writer", _write, place=Permits("rw", WRITER_WEIGHT))
SHARED_WRITER = replace(WRITER, label="shared writer", own=SHARE, variant=True)
READERS = Primitive("readers", _read, place=Permits("rw"), alone=False)
SHARED_READERS = replace(READERS, label="shared readers", own=SHARE, variant=True)
SEMAPHORE = Primitive("semaphore(1)", AsyncSemaphore, ONE, SEM)
WATCHED_SEMAPHORE = Primitive("semaphore(1) with WATCH", AsyncSemaphore, ONE | WATCH, SEM, variant=True)
SHARED_SEMAPHORE = Primitive("shared semaphore(1)", AsyncSemaphore, ONE | SHARE, SEM)
PERMITS = Primitive("semaphore", AsyncSemaphore, FOUR, SEM, alone=False)
WATCHED_PERMITS = Primitive("semaphore with WATCH", AsyncSemaphore, FOUR | WATCH, SEM, alone=False, variant=True)
SHARED_PERMITS = Primitive("shared semaphore", AsyncSemaphore, FOUR | SHARE, SEM, alone=False)

LOCKS = (LOCK, WATCHED_LOCK, SHARED_LOCK, ROBUST, REENTRANT, MULTI, MULTI_IN_ONE_SLOT, REDLOCK, WRITER, SHARED_WRITER)
TOGETHER = (PERMITS, WATCHED_PERMITS, SHARED_PERMITS, READERS, SHARED_READERS)
PRIMITIVES = (*LOCKS, *TOGETHER)

KINDS = (LOCK, SEMAPHORE)
SHARED = (SHARED_LOCK, LINGERING_LOCK, SHARED_SEMAPHORE)
WATCHED = (WATCHED_LOCK, WATCHED_SEMAPHORE)
EVERY = (*PRIMITIVES, LINGERING_LOCK, SEMAPHORE, WATCHED_SEMAPHORE, SHARED_SEMAPHORE)
ALONE = tuple(it for it in EVERY if it.alone)
"""Those that one can have at a time; a semaphore of one permit, too."""


def each(rows: Iterable[Primitive], argument: str = "primitive") -> pytest.MarkDecorator:
    """Run a test for each of these."""
    ci = pytest.mark.ci
    params = [pytest.param(it, id=it.label, marks=[ci] if it.variant else []) for it in rows]
    return pytest.mark.parametrize(argument, params)


def on_one_server(rows: Iterable[Primitive]) -> list[Primitive]:
    """Leave out what one server is not enough for."""
    return [it for it in rows if it.servers == 1]
