"""The coordinator owns what the locks of one client share: the link, the waiters, the renewals.

A service creates one at its start and closes it at its end::

    async with Coordinator(redis) as sync:
        async with sync.lock("orders:42"):
            ...

A lock that was given a bare client uses an implicit hub for the running loop (`_leases/implicit.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ._client.address import owned_client, refuse_client_options
from ._client.cluster import Cluster
from ._client.settings import RETRY_FOR, Client, RedisClient, address_of
from ._core.arguments import Name, Seconds, seconds
from ._core.clock import now
from ._core.display import text
from ._core.keys import LABEL_MARK, lock_keys, process_name
from ._core.observing import Observer
from ._leases.implicit import Binding
from ._leases.options import CoordinatorOptions, HubOptions, Push
from ._leases.until_signal import UntilSignal
from ._primitives.base import makes
from ._primitives.election import LeaderElection
from ._primitives.fence_gate import FenceGate
from ._primitives.lock import AsyncLock, AsyncRobustLock
from ._primitives.multilock import AsyncMultiLock
from ._primitives.parties import AsyncBarrier, AsyncCountDownLatch, AsyncEvent
from ._primitives.reentrant import AsyncReentrantLock
from ._primitives.rwlock import AsyncReadWriteLock
from ._primitives.semaphore import AsyncSemaphore
from ._transaction import transaction, watch_retry
from .jobs import forget, idempotent, once, once_per

if TYPE_CHECKING:
    from ._inspection.views import NameView

__all__ = ["Coordinator", "Push"]


class Coordinator:
    """Runs the locks of one client in one event loop, over one connection to each server.

    A coordinator that is dropped without `aclose` closes its connections when it is collected, with a ResourceWarning.

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
            a warning is logged. "always": raise PushUnavailable instead. "never": poll.
        label: The name of this process for people, at most 512 bytes, where an acquisition has no label. None:
            "host:pid".
        claim: How long a lock that is handed to a waiter is granted at first, 0.01 s to ten years. Its first renewal,
            after a sixth of that, extends it to the full ttl. A longer stall right after a hand-over loses the lease.
        retry_for: How long a command is repeated while Redis is unreachable, before Unreachable is raised. Default 10.
            The last attempt has at least 0.05 seconds.
        exit_timeout: How long the end of a body that failed or was cancelled waits for the answer to its release, which
            then continues in the background. `aclose` waits as long for each answer.
        response_timeout: How long an answer may take before the connection counts as dead. A silent connection counts
            as dead within twice this time and 0.25 seconds. Default: ``socket_timeout`` of the client, else 5
            (transactions: no limit).
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
        label: str | None = None,
        claim: Seconds = 4.5,
        retry_for: Seconds = RETRY_FOR,
        exit_timeout: Seconds = 1.0,
        response_timeout: Seconds | None = None,
        observe: Observer | Iterable[Observer] | None = None,
    ) -> None:
        self._binding = Binding(
            HubOptions(
                client,
                prefix=prefix,
                push=push,
                label=label,
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
        """Return a coordinator with a client of its own, which `aclose` closes, too.

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
        await self.aclose()

    async def aclose(self, *, drain: Seconds = 0.0) -> None:
        """Release all leases, end all waits, and close the connection. Idempotent; one round trip.

        Bodies that still run are cancelled with LeaseLost (reason "closed"). Waiters get CoordinatorClosed. When Redis
        is unreachable, no release is awaited for longer than ``exit_timeout``; it then ends with its ttl. The end of
        the event loop closes in the same way.

        Args:
            drain: How long bodies may go on before that (seconds). Their leases are renewed, nothing new is
                granted, and waiters get CoordinatorClosed immediately. The wait ends as soon as nothing is held.

        Raises:
            WrongContext: The coordinator belongs to another event loop or process.

        On cancellation the closing continues without draining, and the cancellation is raised when it is done.
        """
        await self._binding.close(seconds(drain, "drain"))

    def until_signal(self, *, drain: Seconds = 0.0) -> AbstractAsyncContextManager[None]:
        """Return an async context manager whose body ends in order on SIGTERM and SIGINT.

        When the first of these signals comes:

        1. Nothing is granted any more. Bodies that hold a lease keep running for at most ``drain`` seconds, and their
           leases are renewed. The work of `LeaderElection.run` is cancelled immediately, since it has no end.
        2. As soon as nothing is held, or the time is up, the body of ``until_signal`` is cancelled.
        3. The signal has the effect that it has without the block. SIGTERM raises SystemExit(0), so the program ends
           with exit code 0. SIGINT raises KeyboardInterrupt (130 in a shell). A handler that was installed before, such
           as that of a web server, is called instead.

        A request for a lease waits meanwhile, until the body is cancelled; a task that holds another lease gets
        CoordinatorClosed. If the body ends with CoordinatorClosed, or a group of these, that counts as its end.
        A signal that the process ignores is left alone. A second signal acts as without the block: SIGTERM kills the
        process, and its leases end with their ttl.

        Args:
            drain: How long bodies may keep running (seconds).

        Raises:
            TypeError, ValueError: At the call: ``drain`` is bad.
            RuntimeError: On entering: this is not the main thread, or it was entered before.
            CoordinatorClosed, WrongContext: On entering: the coordinator cannot be used.

        On cancellation from outside nothing is drained, and the cancellation is raised.

        Example:
            ```python
            from redis_sync_aio import Coordinator

            async with Coordinator.from_url("redis://localhost") as sync, sync.until_signal(drain=20):
                async with sync.lock("orders:7") as lease:
                    await write_order(fence=lease.fence)
            ```
        """
        return UntilSignal(self._binding, seconds(drain, "drain"))

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self.client)}{'' if self.why_closed is None else ', closed'}>"

    @property
    def client(self) -> RedisClient:
        """The client it was made from; for a client of valkey-py, that of redis-py with the same settings."""
        return self._binding.options.client

    @property
    def label(self) -> str:
        """The label of this process: "host:pid" unless it was given another."""
        label = self._binding.options.label
        return text(label[: -len(LABEL_MARK)]) if label else process_name()

    @property
    def why_closed(self) -> str | None:
        """The reason why the coordinator cannot be used any more, in words. None: it can be used."""
        return self._binding.why_closed

    @property
    def connections(self) -> int:
        """The number of connections that were opened so far, those after a loss included. 0 before the first use."""
        hub = self._binding.started
        return 0 if hub is None else hub.link.connections

    @property
    def connection_error(self) -> Exception | None:
        """The reason why Redis cannot be reached at the moment. None: it can, or that is not known yet."""
        hub = self._binding.started
        return None if hub is None else hub.link.connection_error

    def statistics(self) -> tuple[NameView, ...]:
        """Return the leases and requests of this process, with times and tasks; sorted by name. Asks no server.

        The views are those of [`inspect`][redis_sync_aio.inspection.inspect], but of this process alone: its tasks are
        the holders and the waiters, and what only the server knows is None. `inspect` has what all processes do.

        Raises:
            WrongContext: The coordinator belongs to another event loop or process.
        """
        from ._leases.statistics import statistics_of  # noqa: PLC0415

        hub = self._binding.started
        if hub is None or hub.why_closed is not None:
            return ()
        hub.check_context()
        return statistics_of(hub)

    async def inspect(
        self, pattern: Name = "*", *, limit: int = 1000, shown: int = 100, idle: bool = False, prefix: str | None = None
    ) -> tuple[NameView, ...]:
        """Return the names that any process holds or waits for, sorted.

        Arguments, errors and cancellation are those of
        [`redis_sync_aio.inspection.inspect`][redis_sync_aio.inspection.inspect].
        """
        from .inspection import inspect  # noqa: PLC0415

        return await inspect(self, pattern, limit=limit, shown=shown, idle=idle, prefix=prefix)

    async def ping(self) -> float:
        """Return the seconds of a round trip to the server, on the way that locks take; of a cluster, to all shards.

        Raises:
            Unreachable: There was no answer within ``retry_for``.
            CommandRefused: The server answered with an error.
            CoordinatorClosed, WrongContext: The coordinator was closed, or belongs to another event loop or process.

        On cancellation the answer is ignored.

        Example:
            ```python
            from redis_sync_aio import Coordinator

            async with Coordinator(redis) as sync:
                print(f"{await sync.ping() * 1000:.1f} ms")
            ```
        """
        hub, prefix = self._binding.hub(), self._binding.options.prefix
        begun = now()
        await hub.read(lock_keys(b"0", prefix))
        if isinstance(hub.servers, Cluster):  # the first answer has made its shards known
            await asyncio.gather(*(hub.read(lock_keys(key, prefix)) for key in hub.servers.key_of_each()))
        return now() - begun

    # -- primitives: arguments and errors are those of the class or function, which takes the coordinator first --

    @makes(AsyncLock)
    def lock(self, *args: Any, **options: Any) -> Any:
        """Return a lock: one holder at a time, in the order of the requests. Arguments: `AsyncLock`."""

    @makes(AsyncSemaphore)
    def semaphore(self, *args: Any, **options: Any) -> Any:
        """Return a semaphore: as many holders at a time as it has permits. Arguments: `AsyncSemaphore`."""

    @makes(AsyncReadWriteLock)
    def read_write_lock(self, *args: Any, **options: Any) -> Any:
        """Return a read/write lock: any number of readers, or one writer. Arguments: `AsyncReadWriteLock`."""

    @makes(AsyncReentrantLock)
    def reentrant_lock(self, *args: Any, **options: Any) -> Any:
        """Return a lock that its owner may acquire again. Arguments: `AsyncReentrantLock`."""

    @makes(AsyncMultiLock)
    def multi_lock(self, *args: Any, **options: Any) -> Any:
        """Return a lock over several names, held on all of them or on none. Arguments: `AsyncMultiLock`."""

    @makes(AsyncRobustLock)
    def robust_lock(self, *args: Any, **options: Any) -> Any:
        """Return a lock whose next holder finds the record of a crashed one. Arguments: `AsyncRobustLock`."""

    @makes(AsyncEvent)
    def event(self, *args: Any, **options: Any) -> Any:
        """Return an event: tasks of all processes wait until one of them sets it. Arguments: `AsyncEvent`."""

    @makes(AsyncCountDownLatch)
    def latch(self, *args: Any, **options: Any) -> Any:
        """Return a latch: tasks wait until it was counted down to 0. Arguments: `AsyncCountDownLatch`."""

    @makes(AsyncBarrier)
    def barrier(self, *args: Any, **options: Any) -> Any:
        """Return a barrier: tasks wait for each other, and pass together. Arguments: `AsyncBarrier`."""

    @makes(LeaderElection)
    def election(self, *args: Any, **options: Any) -> Any:
        """Return an election: one of the candidates leads at a time. Arguments: `LeaderElection`."""

    @makes(FenceGate)
    def fence_gate(self, *args: Any, **options: Any) -> Any:
        """Return a gate that keeps late holders out of a resource. Arguments: `FenceGate`."""

    @makes(transaction)
    def transaction(self, *args: Any, **options: Any) -> Any:
        """Run a body as a transaction, and again after a conflict. Arguments: `redis_sync_aio.transaction`."""

    @makes(watch_retry)
    def watch_retry(self, *args: Any, **options: Any) -> Any:
        """Return a decorator, and loop, of transactions. Arguments: `redis_sync_aio.watch_retry`."""

    @makes(once)
    def once(self, *args: Any, **options: Any) -> Any:
        """Return a context manager that one process enters per slot. Arguments: `redis_sync_aio.once`."""

    @makes(once_per)
    def once_per(self, *args: Any, **options: Any) -> Any:
        """Return a decorator: one call per slot runs. Arguments: `redis_sync_aio.once_per`."""

    @makes(idempotent)
    def idempotent(self, *args: Any, **options: Any) -> Any:
        """Return a decorator: all calls with one name get one result. Arguments: `redis_sync_aio.idempotent`."""

    @makes(forget)
    def forget(self, *args: Any, **options: Any) -> Any:
        """Forget a slot or a result, so that it runs again. Arguments: `redis_sync_aio.jobs.forget`."""
