"""The coordinator owns what the locks of one client share: the link, the waiters, the renewals.

A service creates one at its start and closes it at its end::

    async with Coordinator(redis) as sync:
        async with sync.lock("orders:42"):
            ...

A lock that was given a bare client uses an implicit hub for the running loop (`_acquire/implicit.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from ._acquire.binding import Binding
from ._acquire.options import CoordinatorOptions, Push, hub_options
from ._acquire.statistics import CoordinatorStatistics, HeldHere, WaitingHere, statistics_of
from ._client.owned import owned_client, refuse_client_options
from ._client.retry import RETRY_FOR
from ._client.settings import Client, RedisClient, address_of
from ._core.arguments import Name, Seconds, seconds
from ._core.attached import Observer
from ._core.keys import Engine
from ._core.redis_py_words import explains_words_of_redis_py
from ._leases.hold import OnLost
from .barrier import AsyncBarrier
from .lock import AsyncLock
from .multilock import AsyncMultiLock
from .parties import AsyncCountDownLatch, AsyncEvent
from .reentrant import AsyncReentrantLock
from .rwlock import AsyncReadWriteLock
from .semaphore import AsyncSemaphore, OnMismatch

__all__ = ["Coordinator", "CoordinatorStatistics", "HeldHere", "Push", "WaitingHere"]


class Coordinator:
    """Runs the locks of one client in one event loop, over one connection to each server.

    A service creates one at its start, and closes it at its end. A coordinator that is dropped without `close` closes
    its connections when it is collected, with a ResourceWarning.

    All times are seconds or timedelta.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, however configured, or a `valkey.asyncio.Valkey` or
            `ValkeyCluster`, whose settings a client of redis-py gets
            ([Servers](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/)). Locks do not use its pool:
            one connection with the same settings is opened next to it, to each shard of a cluster.
        prefix: The beginning of all keys and channels, for a user with the rights ``~app1:*`` and ``&app1:*``
            ([Rights](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/#rights)). It ends with a
            colon, as in "app1:". Names in messages and events stay as they are.
        push: "auto" (default): wake-ups are pushed; where the server or the user does not allow that, waiters poll and
            a warning is logged. "always": raise PushUnavailable instead. "never": poll, through the pool of the client.
        claim: How long a lock that is handed to a waiter is granted at first, 0.01 to ten years. Its first renewal,
            after a sixth of that, extends it to the full ttl. This limits what a stopped waiter costs the others: less
            than 5 seconds by default. An event loop that stalls for longer right after a hand-over loses the lease.
        retry_for: How long a command is repeated while Redis is out of reach, before Unreachable is raised. Default 10.
            The last attempt has at least 0.05 seconds.
        exit_timeout: How long the end of a body that failed or was cancelled waits for the answer to its release, which
            then goes on in the background. `close` waits as long for each answer.
        response_timeout: How long an answer may take before the connection counts as dead. A silent connection is
            tested as often, so a black hole is noticed within twice this time and 0.25 seconds. Default:
            ``socket_timeout`` of the client, else 5 (transactions: no limit).
        observe: A function, or several, to call with each event; see `redis_sync_aio.instrumentation`.

    Raises:
        TypeError: The client is not an asyncio Redis client, or an argument has the wrong type.
        ValueError: An argument is out of range.

    Example:
        ```python
        from redis_sync_aio import Coordinator

        async with Coordinator(redis, claim=5) as sync, sync.lock("orders:7") as lease:
            await write_order(fence=lease.fence)
        ```
    """

    def __init__(
        self,
        client: Client,
        *,
        prefix: str = "",
        push: Push = "auto",
        claim: Seconds = 4.5,
        retry_for: Seconds = RETRY_FOR,
        exit_timeout: Seconds = 1.0,
        response_timeout: Seconds | None = None,
        observe: Observer | Iterable[Observer] | None = None,
    ) -> None:
        self._binding = Binding(
            hub_options(
                client,
                prefix=prefix,
                push=push,
                claim=claim,
                retry_for=retry_for,
                exit_timeout=exit_timeout,
                response_timeout=response_timeout,
                observe=observe,
            )
        )

    @classmethod
    def from_url(
        cls, url: str, *, client_options: Mapping[str, Any] | None = None, **options: Unpack[CoordinatorOptions]
    ) -> Self:
        """Return a coordinator with a client of its own, which `close` closes, too.

        `client` is for commands of your own until then. It connects when it is first used.

        Args:
            url: ``redis://HOST:PORT/DB``, ``unix:///PATH``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`` or
                ``redis+cluster://HOST:PORT,HOST:PORT``. ``rediss…`` for TLS. User and password as in any URL.
            client_options: Arguments for the client of redis-py. Those for the sentinels are in ``sentinel_kwargs``.
            options: As for `Coordinator`.

        Raises:
            ValueError: The address cannot be read (the message quotes nothing of it), or an argument is out of range.
            TypeError: An argument has the wrong type, or the client of redis-py does not take it.

        Example:
            ```python
            from redis_sync_aio import Coordinator

            async with Coordinator.from_url("redis://localhost") as sync, sync.lock("orders:7") as lease:
                await write_order(fence=lease.fence)
            ```
        """
        refuse_client_options(cls, options)
        owned = owned_client(url, client_options)
        made = cls(owned.client, **options)
        made._binding.owned = owned
        return made

    async def __aenter__(self) -> Self:
        self._binding.hub()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, drain: Seconds = 0.0) -> None:
        """Release what is held, end what waits, and close the connection. Idempotent; one round trip.

        Bodies that still run are cancelled with LeaseLost (reason "closed"). Waiters get CoordinatorClosed. When Redis
        is out of reach, no release is awaited for longer than ``exit_timeout``; it then ends with its ttl. The end of
        the event loop closes in the same way.

        Args:
            drain: How long bodies may go on before that: seconds or timedelta. Their leases are renewed, nothing new is
                granted, and waiters get CoordinatorClosed immediately. The wait ends as soon as nothing is held.

        Raises:
            WrongContext: The coordinator belongs to another event loop or process.

        On cancellation the closing goes on without draining, and the cancellation is raised when it is done.
        """
        await self._binding.close(seconds(drain, "drain"))

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self.client)}{'' if self.why_closed is None else ', closed'}>"

    @property
    def client(self) -> RedisClient:
        """The client it was made from; for a client of valkey-py, that of redis-py with the same settings."""
        return self._binding.options.client

    @property
    def why_closed(self) -> str | None:
        """The reason why the coordinator cannot be used any more, in words. None: it can be used."""
        return self._binding.why_closed

    @property
    def connections(self) -> int:
        """The number of connections that were opened so far, those after a loss included. 0 before the first use."""
        hub = self._binding.started
        return 0 if hub is None else hub.executor.connections

    @property
    def connection_error(self) -> Exception | None:
        """The reason why Redis cannot be reached at the moment. None: it can, or that is not known yet."""
        hub = self._binding.started
        return None if hub is None else hub.executor.connection_error

    def statistics(self) -> CoordinatorStatistics:
        """Return what this process holds and waits for, since when, and in which tasks. Sends no command.

        Raises WrongContext in another event loop. See `redis_sync_aio.inspection` for what the server knows.
        """
        hub = self._binding.started
        if hub is None or hub.why_closed is not None:
            return CoordinatorStatistics()
        hub.check_context()
        return statistics_of(hub)

    # -- primitives ------------------------------------------------------------------------------------

    @explains_words_of_redis_py
    def lock(
        self,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        share: bool = False,
        linger: Seconds = 0.0,
        max_waiting: int | None = None,
    ) -> AsyncLock:
        """Return a lock: one holder at a time, in the order of the requests.

        Arguments and errors are those of `AsyncLock`.
        """
        return AsyncLock(
            self,
            name,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine=engine,
            share=share,
            linger=linger,
            max_waiting=max_waiting,
        )

    @explains_words_of_redis_py
    def semaphore(
        self,
        name: Name,
        limit: int | None,
        *,
        on_mismatch: OnMismatch = "raise",
        ttl: Seconds = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        share: bool = False,
        linger: Seconds = 0.0,
        max_waiting: int | None = None,
    ) -> AsyncSemaphore:
        """Return a semaphore: as many holders at a time as it has permits.

        Arguments and errors are those of `AsyncSemaphore`.
        """
        return AsyncSemaphore(
            self,
            name,
            limit,
            on_mismatch=on_mismatch,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine=engine,
            share=share,
            linger=linger,
            max_waiting=max_waiting,
        )

    @explains_words_of_redis_py
    def read_write_lock(
        self,
        name: Name,
        *,
        ttl: Seconds = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        share: bool = False,
        linger: Seconds = 0.0,
        max_waiting: int | None = None,
    ) -> AsyncReadWriteLock:
        """Return a read/write lock: any number of readers at a time, or one writer.

        Arguments and errors are those of `AsyncReadWriteLock`.
        """
        return AsyncReadWriteLock(
            self,
            name,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine=engine,
            share=share,
            linger=linger,
            max_waiting=max_waiting,
        )

    @explains_words_of_redis_py
    def reentrant_lock(
        self,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
    ) -> AsyncReentrantLock:
        """Return a lock that its owner, a task or a value, may acquire again.

        Arguments and errors are those of `AsyncReentrantLock`.
        """
        return AsyncReentrantLock(
            self,
            name,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine=engine,
        )

    @explains_words_of_redis_py
    def multi_lock(
        self,
        names: Iterable[Name],
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
    ) -> AsyncMultiLock:
        """Return a lock over several names: it is held on all of them, or on none.

        Arguments and errors are those of `AsyncMultiLock`.
        """
        return AsyncMultiLock(
            self, names, ttl=ttl, auto_renew=auto_renew, max_hold=max_hold, on_lost=on_lost, engine=engine
        )

    def event(self, name: Name, *, keep: Seconds | None = None, engine: Engine = "auto") -> AsyncEvent:
        """Return an event: tasks of all processes wait until one of them sets it.

        Arguments and errors are those of `AsyncEvent`.
        """
        return AsyncEvent(self, name, keep=keep, engine=engine)

    def latch(
        self, name: Name, count: int, *, keep: Seconds = 86_400.0, engine: Engine = "auto"
    ) -> AsyncCountDownLatch:
        """Return a latch: tasks of all processes wait until it was counted down to 0.

        Arguments and errors are those of `AsyncCountDownLatch`.
        """
        return AsyncCountDownLatch(self, name, count, keep=keep, engine=engine)

    def barrier(self, name: Name, parties: int, *, ttl: Seconds = 10.0, engine: Engine = "auto") -> AsyncBarrier:
        """Return a barrier: tasks of all processes wait for each other, and pass together.

        Arguments and errors are those of `AsyncBarrier`.
        """
        return AsyncBarrier(self, name, parties, ttl=ttl, engine=engine)
