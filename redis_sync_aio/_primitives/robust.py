"""AsyncRobustLock: a lock whose next holder learns how far a crashed holder got."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from .._acquire.binding import CoordinatorLike
from .._acquire.request import Request
from .._acquire.resource import Resource
from .._client.settings import Client
from .._core.arguments import Name, Seconds
from .._core.keys import Engine, robust_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.hold import OnLost
from .._recovery.robust_grant import RobustGrant, RobustLease, adopting
from .lock_base import LockBase
from .options import LeaseOptions, by_scripts

__all__ = ["AsyncRobustLock", "RobustLease"]


class AsyncRobustLock(LockBase[RobustLease]):
    """A lock that keeps a record of the work, so that the next holder learns how far a crashed one got.

    Guarantees: those of [`AsyncLock`][redis_sync_aio.AsyncLock], and one more. A holder whose predecessor ended without
    a clean release finds what that one left behind: its progress, and the undo steps that it had recorded
    ([`RobustLease.abandoned`][redis_sync_aio.types.RobustLease.abandoned]).

    An acquisition takes one round trip more than that of an `AsyncLock`. It raises LeaseLost if the lock is lost within
    that. Use this class for all locks of the name: an `AsyncLock` of the same name excludes them, but neither reads nor
    changes the record. If one identity has several leases, the latest records and the others get StaleWriter.
    `force_release` leaves the record, so the next holder finds it abandoned.

    Args:
        client: As for `AsyncLock`.
        name: As for `AsyncLock`.
        ttl: How long a lease lasts unless it is renewed: seconds or timedelta, 0.01 to ten years. None: forever.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: "auto" (default) or "lua": a robust lock needs scripts on the server. It raises CommandRefused where
            they are not allowed, and ValueError for "watch".

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

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
        by_scripts(engine, "a robust lock")
        super().__init__(
            client,
            name,
            robust_keys,
            LeaseOptions(ttl, auto_renew, max_hold, on_lost, "lua" if engine == "auto" else engine),
        )

    def _acquire_alone(self, resource: Resource, request: Request) -> Coroutine[Any, Any, RobustGrant | None]:
        return adopting(super()._acquire_alone(resource, request), resource, request.timeout)
