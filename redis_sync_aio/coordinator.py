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
from ._client.owned import owned_client
from ._client.retry import RETRY_FOR
from ._client.settings import Client, RedisClient, address_of
from ._core.arguments import Name, Seconds, explains_words_of_redis_py, seconds
from ._core.attached import Observer, PatternOf
from ._core.backoff import Backoff
from ._core.keys import Engine
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

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`, however configured, or a `valkey.asyncio.Valkey` or
            `ValkeyCluster`, whose settings a client of redis-py gets
            ([Servers](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/)). Its pool is not used
            for locks; one connection is opened next to it, with the client's own settings, to each shard of a cluster.
        prefix: the beginning of all its keys and channels, as in "app1:", for a user with the rights ``~app1:*`` and
            ``&app1:*`` ([Rights](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/#rights)).
            Names, also in messages and events, stay as they are. It ends with a colon.
        push: "auto" (default): wake-ups are pushed; where the server or the ACL user does not allow that, waiters
            poll and a warning is logged. "always": raise PushUnavailable instead. "never": poll, and send
            commands through the client's pool.
        claim: for how many seconds a lock that is handed to a waiter is granted at first, if it is renewed.
            The first renewal, after a sixth of it, extends it to the full ttl. It bounds what a stopped or unplugged
            (not dead) waiter costs the others; an event loop that stalls longer than this right after a hand-over
            loses the lease, whatever its ttl. Seconds or timedelta, 0.01 to ten years, default 4.5: a stall of 4
            seconds costs no lease, a stopped waiter less than 5 seconds.
        burst: how many times a lease that tasks of this process share is handed on, once others wait for it at the
            server; then it is their turn. Default 64; 0: the order of the server is strict, and nothing is shared.
        slice: for how long it is handed on, once others wait. Seconds or timedelta, more than 0, default 0.005.
        retry_for: for how long a command is repeated while Redis is out of reach, before Unreachable is
            raised; its last attempt has 0.05 seconds at least. Seconds or timedelta, default 10.
        poll_cap: while tasks wait for a name, one command of this process looks at it at least this often. So what
            other clients do with its keys (DEL, PEXPIRE, SET) is noticed. Seconds or timedelta, default 2.5; more
            than 300 counts as 300.
        poll: the back-off of waiters that nobody will wake: polling, or behind a foreign holder. They look when the key
            should end, too, and once more when their timeout is over. Default: ``Backoff(initial=0.01, cap=0.1)``.
        exit_timeout: for how long the end of a body that failed or was cancelled waits for the answer to its release.
            Then its error comes out, and the release goes on in the background. Closing waits for each answer as long.
            Seconds or timedelta, default 1.
        response_timeout: an answer that takes longer means that the connection is dead; a silent connection is
            tested as often while needed. So a black hole is noticed within twice this time and a quarter of a
            second. Seconds or timedelta; default: the client's ``socket_timeout``, else 5 (transactions: no limit).
        observe: a function that is called with each event of this coordinator, or several; see
            `redis_sync_aio.instrumentation`.
        pattern_of: a function that returns the pattern of a name for `Event.pattern`, or None: then it is the part
            before the first ":" and ":*".
        origins: remember the line that acquired each lease, for `statistics`. Costs a few microseconds each.

    Raises:
        TypeError: not an asyncio Redis client, or an argument of the wrong type. ValueError: one out of range.

    One that is dropped without `close` closes its connection when it is collected, with a ResourceWarning.

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
        burst: int = 64,
        slice: Seconds = 0.005,
        retry_for: Seconds = RETRY_FOR,
        poll_cap: Seconds = 2.5,
        poll: Backoff | None = None,
        exit_timeout: Seconds = 1.0,
        response_timeout: Seconds | None = None,
        observe: Observer | Iterable[Observer] | None = None,
        pattern_of: PatternOf | None = None,
        origins: bool = False,
    ) -> None:
        self._binding = Binding(
            hub_options(
                client,
                prefix=prefix,
                push=push,
                claim=claim,
                burst=burst,
                slice=slice,
                retry_for=retry_for,
                poll_cap=poll_cap,
                poll=poll,
                exit_timeout=exit_timeout,
                response_timeout=response_timeout,
                observe=observe,
                pattern_of=pattern_of,
                origins=origins,
            )
        )

    @classmethod
    def from_url(
        cls, url: str, *, client_options: Mapping[str, Any] | None = None, **options: Unpack[CoordinatorOptions]
    ) -> Self:
        """Return a coordinator with a client of its own, which is closed with it.

        Args:
            url: ``redis://HOST:PORT/DB``, ``unix:///PATH``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`` or
                ``redis+cluster://HOST:PORT,HOST:PORT``; ``rediss…`` for TLS. User and password as in any URL:
                ``redis://user:password@HOST``.
            client_options: arguments for the client of redis-py. Those for the sentinels are in ``sentinel_kwargs``.
            options: as `Coordinator`.

        Raises:
            ValueError: the address cannot be read. The message quotes nothing of it: it might be a password.
            TypeError, ValueError: as `Coordinator`, or an argument that the client of redis-py does not take.

        `client` is for commands of your own, until `close`. It connects when it is used.

        Example:
            ```python
            from redis_sync_aio import Coordinator

            async with Coordinator.from_url("redis://localhost") as sync, sync.lock("orders:7") as lease:
                await write_order(fence=lease.fence)
            ```
        """
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
        """Release what is held, end what waits, close the connection. Idempotent.

        Bodies that still run are cancelled with LeaseLost (reason "closed"), waiters get CoordinatorClosed.
        Takes a round trip. When Redis is out of reach no release is waited for longer than ``exit_timeout`` seconds;
        what has no answer by then ends with its ttl. The end of the event loop closes in the same way.

        A client that `from_url` made is closed then, too.

        ``drain``: seconds (or timedelta) for which bodies may go on before that. They are renewed, nothing new is
        granted, and waiters get CoordinatorClosed immediately. It ends as soon as nothing is held.

        Raises WrongContext in another event loop. On cancellation the closing goes on, without draining, and the
        cancellation is raised when it is done.
        """
        await self._binding.close(seconds(drain, "drain"))

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self.client)}{'' if self.why_closed is None else ', closed'}>"

    @property
    def client(self) -> RedisClient:
        """The client it was made from; of a client of valkey-py, that of redis-py with the same settings."""
        return self._binding.options.client

    @property
    def why_closed(self) -> str | None:
        """The reason that it cannot be used any more; None while it can."""
        return self._binding.why_closed

    @property
    def connections(self) -> int:
        """Number of connections that the link has opened so far."""
        hub = self._binding.started
        return 0 if hub is None else hub.executor.connections

    @property
    def connection_error(self) -> Exception | None:
        """The reason that Redis cannot be reached at the moment, if it cannot."""
        hub = self._binding.started
        return None if hub is None else hub.executor.connection_error

    def statistics(self) -> CoordinatorStatistics:
        """Return what this process holds and waits for, since when, and in which tasks. Asks no server.

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
        polled_every: Seconds | None = None,
        min_hold: Seconds = 0.0,
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
            polled_every=polled_every,
            min_hold=min_hold,
            max_waiting=max_waiting,
        )

    @explains_words_of_redis_py
    def semaphore(
        self,
        name: Name,
        *,
        limit: int | None,
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
            limit=limit,
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
            self,
            names,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine=engine,
        )

    def event(self, name: Name, *, lasts: Seconds | None = None, engine: Engine = "auto") -> AsyncEvent:
        """Return an event: tasks of all processes wait until one of them sets it.

        Arguments and errors are those of `AsyncEvent`.
        """
        return AsyncEvent(self, name, lasts=lasts, engine=engine)

    def latch(
        self, name: Name, count: int, *, lasts: Seconds = 86_400.0, engine: Engine = "auto"
    ) -> AsyncCountDownLatch:
        """Return a latch: tasks of all processes wait until it was counted down to 0.

        Arguments and errors are those of `AsyncCountDownLatch`.
        """
        return AsyncCountDownLatch(self, name, count, lasts=lasts, engine=engine)

    def barrier(self, name: Name, parties: int, *, ttl: Seconds = 10.0, engine: Engine = "auto") -> AsyncBarrier:
        """Return a barrier: tasks of all processes wait for each other, and pass together.

        Arguments and errors are those of `AsyncBarrier`.
        """
        return AsyncBarrier(self, name, parties, ttl=ttl, engine=engine)
