"""Contestants: a small adapter per library, so that all run the same code.

A `Grip` is a lock, a permit or a side of a read/write lock in one task's hand: ``lease = await grip.acquire()``,
``await grip.release(lease)``. Where a library has such methods they are used directly, without another coroutine
around them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, TypeAlias

from redis.asyncio import Redis

from .market import Market
from .server_stats import Sends

Kind: TypeAlias = Literal["ours", "peer", "raw", "in-process", "hop", "broken"]
Game: TypeAlias = Literal[
    "locks", "semaphores", "own semaphores", "readers and writers", "market", "transactions", "guarded commits"
]
CONNECTIONS = 1000


@dataclass(frozen=True, slots=True)
class Grip:
    """A lock, a permit, or a side of a read/write lock in one task's hand."""

    acquire: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Awaitable[Any]]


class Contestant:
    """One library in one process. Leases last ``ttl`` seconds; with ``renew`` they are renewed, if the library can."""

    name: ClassVar[str]
    about: ClassVar[str]
    kind: ClassVar[Kind] = "peer"
    plays: ClassVar[frozenset[Game]] = frozenset({"locks"})
    """The kinds of scenario it can take part in."""
    quick: ClassVar[frozenset[str] | None] = None
    """The scenarios in which a quick run includes it; None: all."""
    module: ClassVar[str | None] = None
    """The module that has to be installed."""
    threads: ClassVar[bool] = False
    """Whether it blocks. If so, each task runs in a thread with its own event loop (see Desk.run_tasks)."""
    sends: ClassVar[Sends] = Sends(("set", "evalsha"), {})

    def __init__(self, url: str, ttl: float = 30.0, renew: bool = False) -> None:
        self.url, self.ttl, self.renew = url, ttl, renew

    async def open(self) -> None:
        """Connect, or prepare to."""

    async def close(self) -> None:
        """Close all connections."""

    async def come_to_rest(self) -> None:
        """Return when no lease lingers any more: the loop may be blocked next, while others wait for the lease."""

    def grip(self, key: str) -> Grip:
        """Return the lock ``key`` for one task."""
        raise NotImplementedError

    def permit(self, key: str, limit: int) -> Grip:
        """Return the semaphore ``key`` of ``limit`` permits for one task."""
        raise NotImplementedError

    def take(self, key: str, permits: int) -> Grip:
        """Return the semaphore ``key`` with that many permits for one task; with 0 permits the lock."""
        return self.permit(key, permits) if permits else self.grip(key)

    def side(self, key: str, write: bool) -> Grip:
        """Return a side of the read/write lock ``key`` for one task."""
        raise NotImplementedError

    def market(self) -> Market:
        """Return its implementation of the market."""
        raise NotImplementedError

    def adder(self, key: str) -> Callable[[], Awaitable[Any]]:
        """Return a function that adds one to the number at ``key`` in an optimistic transaction."""
        raise NotImplementedError

    def writer(self, key: str) -> AbstractAsyncContextManager[Callable[[int], Awaitable[Any]]]:
        """Return a context with a function that sets ``key`` with MULTI and EXEC, under a lease if possible."""
        raise NotImplementedError

    def holder_key(self, key: str) -> str:
        """Return the key on the server that exists as long as ``key`` is held."""
        return key

    @classmethod
    def installed(cls) -> bool:
        """Return whether it can take part."""
        return cls.module is None or find_spec(cls.module) is not None


class OnClient(Contestant):
    """A contestant that uses a redis.asyncio client."""

    client: Redis

    async def open(self) -> None:
        self.client = Redis.from_url(self.url, max_connections=CONNECTIONS)

    async def close(self) -> None:
        await self.client.aclose()
