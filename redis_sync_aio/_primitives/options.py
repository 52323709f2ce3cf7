"""The options that all primitives have in common."""

from __future__ import annotations

from dataclasses import dataclass

from .._core.arguments import Seconds
from .._core.keys import Engine
from .._leases.hold import OnLost


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How long leases last, and what is done when they end, as the caller said it. `AsyncLock` explains each option.

    A primitive checks them when it is made.
    """

    ttl: Seconds | None
    auto_renew: bool
    max_hold: Seconds | None
    on_lost: OnLost
    engine: Engine
    share: bool = False
    linger: Seconds = 0.0
