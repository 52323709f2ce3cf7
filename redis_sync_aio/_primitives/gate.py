"""Gates: the common part of events, latches and barriers, which are made of permits."""

from __future__ import annotations

import secrets
from typing import NoReturn

from .._acquire.binding import CoordinatorLike
from .._client.settings import Client
from .._core.arguments import Name, Seconds
from .._core.keys import CLOSED, Engine, PermitKind, permit_keys
from .._leases.grant import Grant
from .._leases.lease import BaseLease
from .._scripts.constants import TEN_YEARS_MS, TOMBSTONE_MS
from ..errors import LimitMismatch, WaitTimeout
from .base import PermitPrimitive
from .options import LeaseOptions, by_scripts

WHAT = {"event": "an event", "latch": "a latch", "barrier": "a barrier"}
REMEMBERED = 60.0
"""Seconds for which the server remembers whom it let in: a waiter whose connection was cut asks within that time."""


class Pass(Grant):
    """The permit of a waiter that was let in. Its end is no loss, and however late it arrives, the waiter is let in."""

    protects = reports_loss = False


class Gate(PermitPrimitive[BaseLease]):
    """A gate lets in nobody, or everybody. A waiter that was let in gives its permit back immediately."""

    _weight = 1
    _grant_type = Pass

    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        kind: PermitKind,
        whole: int,
        engine: Engine,
        max_waiting: int | None = None,
    ) -> None:
        """Make it; ``whole``: how many counts, or parties, it takes to open it."""
        by_scripts(engine, WHAT[kind])
        self._kind = kind
        self.whole = whole
        self._limit = -whole
        options = LeaseOptions(
            REMEMBERED, auto_renew=False, max_hold=None, on_lost="event", engine=engine, max_waiting=max_waiting
        )
        super().__init__(client, name, lambda wire, prefix: permit_keys(wire, kind, prefix), options)

    async def wait(self, timeout: Seconds | None) -> int:
        """Wait until this waiter is let in; return the fence of its permit."""
        grant = await self._grant(self._request(None, None, timeout))
        if grant.observation is not None:
            grant.observation.end(None)  # it was let in; what becomes of its permit is no loss
        grant.give_back()
        return grant.fence

    def _taken(self, request: object, data: str | None) -> NoReturn:
        raise WaitTimeout(name=self.name, within=0, closed=CLOSED[self._kind])

    def token(self) -> tuple[bytes, int]:
        """Return a token for one command, and for how many ms the server has to remember it: copies come until then."""
        return b"once:" + secrets.token_hex(16).encode(), max(TOMBSTONE_MS, int(self._at_work().retry_for * 2000))

    async def count(self) -> int:
        """Return the count that is missing until it opens; 0: it is open."""
        limit, _ = await self._limit_and_queue()
        return max(0, -(limit or -self.whole))

    async def count_down(self, by: int, lasts_ms: int, identity: bytes | None = None) -> int:
        """Count it down ``by`` so much, or close it again (0); return the count that is left."""
        if identity is None:
            token, token_ms = self.token()
            lasts_ms = max(lasts_ms, token_ms)
        else:  # it counts once, as long as the count is remembered
            token, token_ms = b"by:" + identity, TEN_YEARS_MS
        words = (token, by, self.whole, lasts_ms, token_ms)
        reply = await self._at_work().ask(
            lambda commands, delivery: commands.count_down(self._keys, words, delivery), goes_on=True
        )
        count = int(reply)
        if count < 0:
            raise LimitMismatch.of_count(name=self.name, expected=self.whole, found=-count)
        return count
