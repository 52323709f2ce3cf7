"""Where a lease is in its life, and what was asked for it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .._client.resp import Argument


class LeaseState(Enum):
    """Where a lease is in its life."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


HELD, RELEASED = LeaseState.HELD, LeaseState.RELEASED


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
