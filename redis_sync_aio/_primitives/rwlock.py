"""AsyncReadWriteLock: any number of readers, or one writer, in the order in which they came."""

from __future__ import annotations

from .._client.settings import Client
from .._core.arguments import Name, Seconds
from .._core.display import text
from .._core.keys import READ_WRITE, Engine, PermitKeys, permit_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.commands import Commands
from .._leases.acquisition import Request
from .._leases.grant import Grant
from .._leases.hold import OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import BaseLease, GuardingLease, WriteLease, grant_of
from .._leases.resource import Resource
from .._scripts.constants import WRITER_WEIGHT, ReleaseReply
from .._transport.call import Call
from ..errors import NotHeld, SyncError, WouldDeadlock
from ..errors._base import RELEASE_TO_WRITE
from .base import Face, L, LeaseOptions, PermitPrimitive, by_scripts

__all__ = ["AsyncReadWriteLock", "ReadSide", "WriteSide"]


class Side(PermitPrimitive[L]):
    """The readers' or the writers' side of a read/write lock: acquired like an `AsyncLock`.

    Made by `AsyncReadWriteLock.read` and `AsyncReadWriteLock.write`. It has `acquire`, `try_acquire`, `wrap`
    and `release`, and is itself an async context manager. An identity has one permit: ``release(identity=...)`` gives
    it up on whichever side it is.
    """

    _limit = WRITER_WEIGHT
    _keys: PermitKeys

    async def _acquire_alone(self, resource: Resource, request: Request, within: float | None) -> Grant | None:
        lease = await super()._acquire_alone(resource, request, within)
        if lease is not None and lease.weight != self._weight:  # the identity has the other side
            resource.decline(lease)
            writes = lease.weight == WRITER_WEIGHT
            has = "writing: go on with that lease, or downgrade() it" if writes else f"reading: {RELEASE_TO_WRITE}"
            raise WouldDeadlock(f"{text(lease.wire_token)!r} holds {self.name!r} already, for {has}")
        return lease

    def _held(self) -> list[Grant]:
        return [lease for lease in self._leases() if lease.weight == self._side]  # the other side has the same keys

    async def locked(self) -> bool:
        """Return whether this side is locked out: to readers by a writer, to writers by any holder.

        Two round trips; errors and cancellation are those of `statistics`.
        """
        return any(self._kind == "write" or it.access == "write" for it in (await self.statistics()).holders)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl={self._ttl_ms / 1000}>"


def _keys_of_both(name: bytes, prefix: bytes) -> PermitKeys:
    return permit_keys(name, READ_WRITE.ending, prefix)


class ReadSide(Side[GuardingLease]):
    """The readers' side of an `AsyncReadWriteLock`, made by its ``read()``: any number of leases at a time.

    It is acquired like an [`AsyncLock`][redis_sync_aio.AsyncLock], and is itself an async context manager. An identity
    has one permit, on one side: an identity that writes gets WouldDeadlock here.

    Example:
        ```python
        async with rw.read() as lease:
            ...
        ```
    """

    _lease_type = GuardingLease
    _kind = _access = "read"
    _weight = _side = 1


class WriteSide(Side[WriteLease]):
    """The writers' side of an `AsyncReadWriteLock`, made by its ``write()``: one lease at a time, and no reader.

    It is acquired like an [`AsyncLock`][redis_sync_aio.AsyncLock], and is itself an async context manager. An identity
    has one permit, on one side: an identity that reads gets WouldDeadlock here. Release its lease first.

    Example:
        ```python
        async with rw.write() as lease:
            ...
        ```
    """

    _lease_type = WriteLease
    _kind = _access = "write"
    _weight = _side = WRITER_WEIGHT

    async def _downgrade(self, lease: Grant) -> None:
        """Turn ``lease`` of a writer into one of a reader, as `AsyncReadWriteLock.downgrade` says."""
        lease.check_context()
        lease.check()
        if lease.keys != self._keys or lease.weight != WRITER_WEIGHT:
            raise NotHeld(
                f"not a writer's lease of {self.name!r}, or not held any more: {lease!r}; "
                "downgrade() takes one of write()"
            )
        lease.become_reader()  # immediately, and in any case: from here on the caller must not write
        manager, here = lease.manager.hub.manager, lease.same_identity

        def send(commands: Commands, call: Call) -> None:
            if here is not None:
                here.end_by(lease.wire_token, call, at_least=WRITER_WEIGHT)
            commands.downgrade(self._keys, lease.wire_token, call)

        def answered(call: Call) -> SyncError | None:
            if call.error is not None:
                # On the server it may still be the writer's, and the renewals of the reader would keep that forever.
                manager.releases.repeat_downgrade(lease)
                return call.error
            if call.reply != ReleaseReply.RELEASED:
                lease.lose("expired")
                return lease.loss()
            return None

        await manager.ask(lease, send, answered)


class AsyncReadWriteLock(Face[ReadSide]):
    """A fair read/write lock with a lease for each reader and for the writer.

    Guarantees:

    - By the server's clock there are live leases of readers, or one of a writer, never of both.
    - Turns come in the order of arrival. Readers do not overtake a waiting writer. One release lets in all readers that
      are next to each other in the queue.
    - A reader that crashed delays a writer by the rest of its lease at most.
    - Everything else is as for [`AsyncLock`][redis_sync_aio.AsyncLock].

    The fence of a writer is greater than every earlier one. Readers have the fence of the last writer, so two readers
    with the same fence saw the same state.

    The lock is not reentrant. A reader that asks for the write side inside its own body gets WouldDeadlock: release the
    read side first. Then `previous_fence` of the [`WriteLease`][redis_sync_aio.types.WriteLease] tells whether there
    was another writer in between.

    Args:
        client: As for `AsyncLock`.
        name: As for `AsyncLock`, 1 to 8192 bytes. It is independent of a lock or a semaphore of the same name.
        ttl: How long a lease lasts unless it is renewed, 0.01 s to ten years.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: "auto" (default) or "lua". It needs scripts: CommandRefused without them, ValueError for "watch".
        share: Tasks of this process read under one permit together while no writer waits, and hand the permit of the
            writer to each other, as for `AsyncLock`
            ([Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/)).
        linger: As for `AsyncLock`.
        max_waiting: As for `AsyncLock`.
        replicas: As for `AsyncLock`, on both sides.
        replicated_within: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

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
        replicas: int = 0,
        replicated_within: Seconds = 1.0,
    ) -> None:
        if ttl is None:  # for callers without a type checker
            raise TypeError("a read/write lock needs a ttl: a crashed reader would keep writers out forever")
        by_scripts(engine, READ_WRITE.title)
        options = LeaseOptions(
            ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting, replicas, replicated_within
        )
        self._on = ReadSide(client, name, _keys_of_both, options)
        self._write = WriteSide(client, name, _keys_of_both, options)

    def read(self) -> ReadSide:
        """Return the readers' side.

        ``async with rw.read() as lease``, ``await rw.read().acquire(timeout=5)`` …
        """
        return self._on

    def write(self) -> WriteSide:
        """Return the writers' side.

        ``async with rw.write() as lease``, ``await rw.write().try_acquire()`` …
        """
        return self._write

    async def downgrade(self, lease: GuardingLease) -> None:
        """Turn the lease of a writer into one of a reader, without a gap. The same lease object keeps its fence.

        Readers at the head of the queue get in immediately.

        Args:
            lease: A lease of a writer of this lock, held by this process.

        Raises:
            TypeError: The argument is not a lease. Nothing was sent.
            NotHeld: The lease was released, or is not one of a writer of this lock.
            LeaseLost: The lease was lost.
            Unreachable, CommandRefused: As for `AsyncLock.acquire`.

        After a cancellation or an error the lease may be either on the server, and the downgrade is repeated in the
        background for as long as the lease lasts. Do not write any more.
        """
        if not isinstance(lease, BaseLease):  # for callers without a type checker
            raise TypeError(f"lease must be a writer's lease of {self.name!r}, not {lease!r}")
        await self._write._downgrade(grant_of(lease))

    async def locked(self) -> bool:
        """Return whether it has a reader or a writer. One round trip; otherwise as `statistics`."""
        return bool((await self._on._look(1)).holders)

    def __repr__(self) -> str:
        return f"<AsyncReadWriteLock {self.name!r} ttl={self._on._ttl_ms / 1000}>"
