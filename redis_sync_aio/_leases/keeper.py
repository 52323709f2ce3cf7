"""Where a lease is in its life, and the protocols that it relies on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from .._client.settings import Client

if TYPE_CHECKING:
    from .._client.resp import Argument
    from .._core.keys import Keys
    from .grant import Grant


class LeaseState(Enum):
    """Where a lease is in its life."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


HELD, RELEASED = LeaseState.HELD, LeaseState.RELEASED


class LeaseManager(Protocol):
    """What a lease needs of the one who keeps it.

    `Renewals` keep those on the server, a `Bundle` the shares of a multi-lease, a `Cohort` what its tasks share.
    """

    loop: asyncio.AbstractEventLoop
    client: Client
    response_timeout: float
    asked_response_timeout: float | None
    """Seconds that the caller gives an answer; None: as its client does."""
    exit_timeout: float
    """Seconds that the end of a body that failed waits for its release."""
    retry_for: float

    def check_context(self) -> None: ...
    def stalled_since(self, time: float) -> float: ...
    def answering(self, keys: Keys, stalled: bool) -> bool: ...
    def release(self, lease: Grant) -> None: ...
    def forget(self, lease: Grant) -> None: ...
    def members_of(self, lease: Grant) -> tuple[Grant, ...]: ...
    async def extend(self, lease: Grant, ttl: int) -> None: ...


class Terms(Protocol):
    """The part of a request that a lease goes on to need."""

    @property
    def ttl_ms(self) -> int: ...
    @property
    def auto_renew(self) -> bool: ...
    @property
    def max_hold(self) -> float | None: ...
    @property
    def identity(self) -> bytes | None: ...
    @property
    def reusable(self) -> bool: ...
    @property
    def weight(self) -> int: ...
    @property
    def closing(self) -> tuple[Argument, ...]: ...


class IdentityReleases(Protocol):
    """What the release of a lease that was acquired for an identity means for others of that identity."""

    def release_sent(self, identity: bytes, at_least: int, /) -> None: ...
    def release_answered(self, identity: bytes, /) -> None: ...


class Group(Protocol):
    """What leases stand on this one, which is then released by them only."""

    @property
    def shares(self) -> Sequence[Grant]: ...
    def ownerless(self) -> bool: ...


class Releaser(Protocol):
    """Who waits for what becomes of a release."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...
