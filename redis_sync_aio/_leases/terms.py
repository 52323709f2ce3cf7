"""The states of a grant, and the part of a request that it keeps."""

from __future__ import annotations

import math
from enum import Enum
from typing import Protocol


class LeaseState(Enum):
    """The state of a grant."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


ENDLESS = math.inf  # a name of a module is found sooner than its attribute, and each grant needs it
HELD, RELEASED = LeaseState.HELD, LeaseState.RELEASED


class Terms(Protocol):
    """The part of a request that its grant keeps."""

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


class IdentityReleases(Protocol):
    """Learns of the releases of an identity, for other requests of the same identity."""

    def release_sent(self, identity: bytes, /) -> None: ...
    def release_answered(self, identity: bytes, /) -> None: ...
