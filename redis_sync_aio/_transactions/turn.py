"""Taking turns: after some conflicts a transaction queues up with the others instead of racing them.

The turn decides nothing: EXEC does. So whoever knows of no turns mixes with those who do, and a turn whose lease was
lost does no harm. It only makes it likely that the one whose turn it is meets nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from redis.asyncio import Redis

from .._client.checkout import Encodables
from .._client.resp import Reply
from .._core.clock import now
from ..errors import SyncError
from .handle import Transaction


class Turn(Protocol):
    """The turn on the keys of one transaction, to be taken in a fair lock."""

    keys: tuple[bytes, ...]
    """The keys that exist while somebody has the turn."""

    @property
    def held(self) -> bool:
        """Whether it was taken, and lasts."""
        ...

    async def take(self, timeout: float | None) -> None:
        """Wait for the turn. Raises AcquireTimeout. On cancellation nothing is left."""

    def give_back(self) -> None:
        """Let the next one have it, if it was taken."""


class PoliteTransaction(Transaction):
    """A transaction that looks, together with its WATCH, whether somebody has the turn, and then takes its own."""

    def __init__(
        self,
        client: Redis,
        keys: tuple[bytes, ...],
        also_watched: tuple[bytes, ...],
        first: Sequence[Encodables],
        turns: tuple[bytes, ...],
        take_turn: Callable[[], Awaitable[None]],
        response_timeout: float | None = None,
    ) -> None:
        super().__init__(client, keys, also_watched, first, response_timeout)
        self._turns = turns
        self._take_turn = take_turn

    def _questions(self) -> Sequence[Encodables]:
        return [("EXISTS", *self._turns)] if self._turns else ()

    async def _answered(self, replies: Sequence[Reply]) -> bool:
        if not any(replies):
            return True
        # The connection goes back first: those who wait must not keep it from the one whose turn it is.
        await self._begin_again()
        try:
            await self._take_turn()
        except SyncError as error:
            self._connection_error, self._asked = error, now()  # to wait for the turn is no trouble
            raise
        self._turns = ()
        return False
