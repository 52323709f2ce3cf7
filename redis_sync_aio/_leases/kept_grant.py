"""A grant that lasts for a minimum time on the server, however early it is released."""

from __future__ import annotations

import math

from .._core.clock import now
from .._core.keys import Keys
from .grant import Grant, LeaseManager
from .terms import Terms


class KeptGrant(Grant):
    """A grant of a lock with ``min_hold``. Its release lets it end when that is over, and not before."""

    def __init__(
        self, manager: LeaseManager, keys: Keys, token: bytes, fence: int, deadline: float, period: float, terms: Terms
    ) -> None:
        super().__init__(manager, keys, token, fence, deadline, period, terms)
        self._kept_until = now() + terms.min_hold  # since is earlier: before the request was sent

    def kept_ms(self) -> int:
        """Return for how many milliseconds more it is kept; 0 if no task ever had it, since that was undone."""
        return 0 if self.acquirer is None else max(0, math.ceil((self._kept_until - now()) * 1000))
