"""AsyncReadWriteLock: any number of readers, or one writer, in the order in which they came."""

from __future__ import annotations

from dataclasses import dataclass

from ._acquire.binding import CoordinatorLike
from ._acquire.request import Request
from ._acquire.resource import Resource
from ._client.settings import Client
from ._core.arguments import Name, Seconds, explains_words_of_redis_py
from ._core.display import text
from ._core.keys import Engine, PermitKeys, permit_keys
from ._leases.grant import Grant
from ._leases.hold import Hold, OnLost
from ._leases.lease import Lease, grant_of
from ._primitives.base import PermitPrimitive
from ._primitives.options import LeaseOptions
from ._primitives.upgrade import Upgrader
from ._scripts.constants import WRITER_WEIGHT
from .errors import WouldDeadlock

__all__ = ["AsyncReadWriteLock", "ReadSide", "ReadWriteStatistics", "WriteSide"]


@dataclass(frozen=True, slots=True)
class ReadWriteStatistics:
    """The state of a read/write lock on the server at one moment.

    Attributes:
        writer: token or identity of the writer; None when nobody writes.
        readers: how many read.
        reading: tokens or identities of the readers, those whose lease ends first at the front, 100 at most.
        fence: fence of the latest writer, as `LockStatistics`.
        waiters: how many requests are queued, as `LockStatistics`.
        waiting: ("read" or "write", token or identity) of the first waiters, in order, 100 at most.
    """

    writer: str | None
    readers: int
    reading: tuple[str, ...]
    fence: int | None
    waiters: int
    waiting: tuple[tuple[str, str], ...]


class Side(PermitPrimitive):
    """The readers' or the writers' side of a read/write lock: acquired like an `AsyncLock`.

    Made by `AsyncReadWriteLock.read` and `AsyncReadWriteLock.write`. It has `acquire`, `try_acquire`, `hold`, `wrap`
    and `release`, and is itself an async context manager. An identity has one permit: ``release(identity=...)`` gives
    it up on whichever side it is.
    """

    _limit = WRITER_WEIGHT
    _keys: PermitKeys

    async def _acquire_alone(self, resource: Resource, request: Request) -> Grant | None:
        lease = await super()._acquire_alone(resource, request)
        if lease is not None and lease.weight != self._weight:  # the identity has the other side
            resource.decline(lease)
            writes = lease.weight == WRITER_WEIGHT
            raise WouldDeadlock.other_side(self.name, identity=text(lease.wire_token), writes=writes)
        return lease

    def _held(self) -> list[Grant]:
        return [lease for lease in self._leases() if lease.weight == self._side]  # the other side has the same keys

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl={self._ttl_ms / 1000}>"


def _keys_of_both(name: bytes, prefix: bytes) -> PermitKeys:
    return permit_keys(name, "rw", prefix)


class ReadSide(Side):
    """The readers' side of an `AsyncReadWriteLock`, made by its ``read()``: any number of leases at a time.

    It has `acquire`, `try_acquire`, `hold`, `wrap` and `release`, as `AsyncLock` has them, and is itself an async
    context manager. Asking with an identity that writes raises WouldDeadlock: it has one permit, on one side.

    Example:
        ```python
        async with rw.read() as lease:
            ...
        ```
    """

    _kind = "read"
    _weight = _side = 1


class WriteSide(Side):
    """The writers' side of an `AsyncReadWriteLock`, made by its ``write()``: one lease at a time, and no reader.

    It has `acquire`, `try_acquire`, `hold`, `wrap` and `release`, as `AsyncLock` has them, and is itself an async
    context manager. Asking with an identity that reads raises WouldDeadlock: it has one permit, on one side; `upgrade`
    its lease.

    Example:
        ```python
        async with rw.write() as lease:
            ...
        ```
    """

    _kind = "write"
    _weight = _side = WRITER_WEIGHT


class AsyncReadWriteLock:
    """A fair read/write lock with a lease for each reader and for the writer.

    Guarantees: by the server's clock there are live leases of readers, or of one writer, never of both; turns come in
    the order of arrival: a writer that waits is not passed by readers that came later, and readers that stand in a
    row get in together by one release. A crashed reader delays a writer by the rest of its lease at most. Everything
    else is as for `AsyncLock`. A writer's fence is greater than every earlier one; readers have the fence of the last
    writer, so two readers with the same fence saw the same state.

    It is not reentrant. A reader that asks for the write side inside its own body gets WouldDeadlock: use `upgrade`.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: 1 to 8192 bytes; in a cluster, one with a ``}`` needs a whole hash tag, as in "orders:{42}". It has
            nothing to do with a lock or a semaphore of the same name.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years.
        auto_renew: renew leases in the background, for as long as they are held.
        max_hold: seconds (or timedelta) after which a lease is not renewed any more, and so is lost; None: no limit.
        on_lost: "cancel" (default): the body is cancelled when its lease is lost; "event": only ``lease.lost`` is set.
        engine: "auto" (default), "lua" or "watch": how the server decides, as for `AsyncLock`.
        linger: for how many seconds (or timedelta) what tasks share is kept when none has it, as for `AsyncLock`.
        max_waiting: raise QueueFull instead of waiting behind so many others; None (default): any number.
        share: tasks of this process read by one permit together, as long as no writer waits, and hand the writer's on
            among themselves: see `AsyncLock` and
            [Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/).

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncReadWriteLock

        config = AsyncReadWriteLock(redis, "config")
        async with config.read():
            value = await load()
        async with config.write() as lease:
            await store(value, fence=lease.fence)
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
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
    ) -> None:
        if ttl is None:  # for callers without a type checker
            raise TypeError("a read/write lock needs a ttl: a crashed reader would keep writers out forever")
        options = LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting)
        self._read = ReadSide(client, name, _keys_of_both, options)
        self._write = WriteSide(client, name, _keys_of_both, options)
        self._upgrade = Upgrader(self._read, self._read._keys, on_lost)

    def read(self) -> ReadSide:
        """Return the readers' side.

        ``async with rw.read() as lease``, ``await rw.read().acquire(timeout=5)``, ``rw.read().hold(identity="x")`` …
        """
        return self._read

    def write(self) -> WriteSide:
        """Return the writers' side.

        ``async with rw.write() as lease``, ``await rw.write().try_acquire()``, ``rw.write().hold(timeout=5)`` …
        """
        return self._write

    def upgrade(self, lease: Lease, *, timeout: Seconds | None = None) -> Hold[Lease]:
        """Return an async context manager in whose body a reader is the writer; afterwards it reads again.

        It waits until the other readers are gone, ahead of all that wait; nobody else writes in between, so
        what was read is still true. The body gets a lease with a writer's fence, which the reader's has from then on,
        too; the reader's lease goes on. The writer's lasts no longer: when the reader's is released or lost, by
        ``max_hold`` or without renewals, too, the writer's is lost.

        Args:
            lease: a reader's lease of this lock, held by this process.
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.

        Raises:
            TypeError, ValueError: a bad argument; at the call, and nothing was sent.

        Raises on entering:
            WouldDeadlock: another reader waits for the same; one of the two has to release first. Or this lease is
                upgraded already.
            AcquireTimeout: the other readers did not go away; ``lease`` still reads.
            LeaseLost: the reader's lease is lost. NotHeld: it is not a reader's, or was released.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.

        On cancellation ``lease`` still reads.
        """
        self._check_lease(lease, "reader")
        return self._upgrade.hold(lease, timeout)

    async def downgrade(self, lease: Lease) -> None:
        """Make a writer's lease one of a reader, without a gap: readers at the head of the queue get in immediately.

        The same lease object goes on, with its fence. A lease of `upgrade` ends instead, as at the end of its body, and
        the reader's lease goes on.

        Raises:
            TypeError: it is no lease. Nothing was sent.
            NotHeld: it is not a writer's lease of this lock, or was released. LeaseLost: it was lost.
            Unreachable, CommandRefused: as `AsyncLock.acquire`.

        On cancellation, and after an error, it may be either on the server. For as long as the lease lasts, a command
        in the background repeats that it reads; do not write any more.
        """
        self._check_lease(lease, "writer")
        await self._upgrade.downgrade(grant_of(lease))

    def _check_lease(self, lease: Lease, what: str) -> None:
        if not isinstance(lease, Lease):  # for callers without a type checker
            raise TypeError(f"lease must be a {what}'s lease of {self.name!r}, not {lease!r}")

    async def statistics(self) -> ReadWriteStatistics:
        """Return writer, readers, waiters and fence as the server sees them. One round trip.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `AsyncLock.acquire`. On cancellation the
        answer is ignored.
        """
        view = await self._read._view()
        writer = next((text(permit.token) for permit in view.permits if permit.weight == WRITER_WEIGHT), None)
        return ReadWriteStatistics(
            writer=writer,
            readers=0 if writer is not None else view.used,
            reading=tuple(text(permit.token) for permit in view.permits if permit.weight < WRITER_WEIGHT),
            fence=view.fence or None,
            waiters=view.waiting + self._read._behind_tickets(),
            waiting=tuple(
                ("write" if ticket.weight == WRITER_WEIGHT else "read", text(ticket.token)) for ticket in view.tickets
            ),
        )

    async def locked(self) -> bool:
        """Return whether anybody reads or writes. One round trip; errors and cancellation as in `statistics`."""
        return (await self._read._view()).used > 0

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._read.name

    def __repr__(self) -> str:
        return f"<AsyncReadWriteLock {self.name!r} ttl={self._read._ttl_ms / 1000}>"
