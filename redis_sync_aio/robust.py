"""AsyncRobustLock: a lock whose next holder learns how far a crashed holder got."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from ._acquire.binding import CoordinatorLike
from ._acquire.request import Request
from ._acquire.resource import Resource
from ._client.settings import Client
from ._core.arguments import Name, Seconds, explains_words_of_redis_py
from ._core.keys import Engine, robust_keys
from ._leases.hold import OnLost
from ._primitives.lock_base import LockBase
from ._primitives.options import LeaseOptions
from ._recovery.robust_grant import RobustGrant, RobustLease, adopting

__all__ = ["AsyncRobustLock", "RobustLease"]


class AsyncRobustLock(LockBase[RobustLease]):
    """A lock that keeps a record of the work, so that a crashed holder's successor learns how far it got.

    Guarantees: those of `AsyncLock`, and one more. A holder whose predecessor ended without a clean release finds what
    that one left behind (`RobustLease.abandoned`): its progress, and the undo steps that it had recorded.

    An acquisition takes one round trip more than that of an `AsyncLock`, and raises LeaseLost if the lock was lost
    within that. Use this class for all locks of the name: an `AsyncLock` excludes them as ever, but neither reads nor
    changes the record. Of several leases of one identity the one that acquired last records; the others get
    StaleWriter. `force_release` leaves the record, so the next holder finds it abandoned.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: the key that holds the holder's token, as for `AsyncLock`.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years. None: forever.
        auto_renew: renew leases in the background, for as long as they are held.
        max_hold: seconds (or timedelta) after which a lease is not renewed any more, and so is lost; None: no limit.
        on_lost: "cancel" (default): the body is cancelled when its lease is lost; "event": only ``lease.lost`` is set.
        engine: "auto" (default) and "lua" are the same here: a robust lock needs scripts on the server, and raises
            CommandRefused where they are not allowed. "watch" is refused with ValueError.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncRobustLock

        lock = AsyncRobustLock(redis, "order:7", ttl=30)
        async with lock as lease:
            if lease.abandoned:
                await finish_or_undo(lease.progress)
            await lease.record({"charged": 120})
        ```
    """

    _kind = "robust"
    _grant_type = RobustGrant
    _lease_type = RobustLease
    _release_args = (b"*", b"0")  # released by its identity: whichever of its leases wrote the record

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
    ) -> None:
        if engine == "watch":
            raise ValueError('a robust lock needs scripts: engine must be "lua" or "auto", not "watch"')
        super().__init__(
            client,
            name,
            robust_keys,
            LeaseOptions(ttl, auto_renew, max_hold, on_lost, "lua" if engine == "auto" else engine),
        )

    def _acquire_alone(self, resource: Resource, request: Request) -> Coroutine[Any, Any, RobustGrant | None]:
        return adopting(super()._acquire_alone(resource, request), resource, request.timeout)
