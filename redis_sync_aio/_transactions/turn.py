"""Taking turns: after some conflicts a transaction queues up with the others instead of racing them.

The turn decides nothing: EXEC does. So transactions without turns mix with those that take turns, and a turn whose
lease was lost does no harm. A turn only makes conflicts unlikely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .._client.checkout import Encodables
from .._client.resp import Reply
from .watch_session import Wait


class Turn(Protocol):
    """The turn on the keys of one transaction: a lease of a fair lock."""

    keys: tuple[bytes, ...]
    """The keys that exist while a transaction has the turn."""

    @property
    def held(self) -> bool:
        """Whether it was taken, and lasts."""
        ...

    async def take(self, timeout: float | None) -> None:
        """Wait for the turn. Raises AcquireTimeout. On cancellation nothing is left."""

    def give_back(self) -> None:
        """Give the turn back, if it was taken."""


class TurnCheck:
    """A precheck that looks whether somebody has the turn, and then takes our own."""

    keys = ()

    def __init__(self, turn: Turn, take: Wait) -> None:
        self._asks = not turn.held
        self._turns = turn.keys
        self._take = take

    def commands(self) -> Sequence[Encodables]:
        """Return the commands that tell whether somebody has the turn; none when it is ours."""
        return [("EXISTS", *self._turns)] if self._asks else ()

    def verify(self, replies: Sequence[Reply]) -> Wait | None:
        """Return the taking of our turn if somebody has it."""
        return self._take_turn if any(replies) else None

    async def _take_turn(self) -> None:
        await self._take()
        self._asks = False
