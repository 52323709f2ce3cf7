"""Whether what a token holds is held still, asked by plain commands: for those who watch it. Compare `watch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._client.resp import Reply, Words
from .._core.keys import Keys, PermitKeys
from .._scripts.constants import WRITER_WEIGHT
from ..errors import LossReason


@dataclass(frozen=True, slots=True)
class Ownership:
    """What ``token`` holds of ``keys``."""

    keys: Keys
    token: bytes

    def watched(self) -> tuple[bytes, ...]:
        """Return the keys that change when it is lost."""
        return self.keys.all[:2] if isinstance(self.keys, PermitKeys) else self.keys.all[:1]

    def questions(self) -> tuple[Words, ...]:
        """Return the commands whose answers tell."""
        if isinstance(self.keys, PermitKeys):
            permits, state = self.watched()
            return (b"ZSCORE", permits, self.token), (b"HGET", state, b"=" + self.token)
        return ((b"GET", *self.watched()),)

    def loss(self, weight: int, answers: Sequence[Reply], time: int) -> LossReason | None:
        """Return why it is lost, by the answers of the server at its ``time`` (us); None when it is held.

        ``weight``: how many permits its holder thinks that it is.
        """
        if not isinstance(self.keys, PermitKeys):
            (holder,) = answers
            return None if holder == self.token else "expired" if holder is None else "taken"
        until, permit = answers
        # Weight 0 is a tombstone; and what was a writer's may be a reader's by now. Otherwise the weight does not
        # matter: the same identity may have asked again, for more or less.
        found = 0 if permit is None else int(permit.split(b" ", 1)[0])
        enough = found == weight if weight == WRITER_WEIGHT else found > 0
        return None if until is not None and float(until) > time and enough else "expired"
