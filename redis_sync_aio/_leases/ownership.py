"""The guard of a transaction: it asks by plain commands whether a lease is still held. Compare `_engine.watch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .._client.resp import Reply, Words
from .._core.keys import Keys, PermitKeys
from .._engine.watch_dialogue import microseconds
from .._scripts.constants import WRITER_WEIGHT
from ..errors import LeaseLost, LossReason


@dataclass(frozen=True, slots=True)
class Ownership:
    """The hold of ``token`` on ``keys``, as a transaction checks it."""

    keys: Keys
    token: bytes

    def watched(self) -> tuple[bytes, ...]:
        """Return the keys that change when it is lost."""
        return self.keys.all[:2] if isinstance(self.keys, PermitKeys) else self.keys.all[:1]

    def questions(self) -> tuple[Words, ...]:
        """Return the commands that ask for it."""
        if isinstance(self.keys, PermitKeys):
            permits, state = self.watched()
            return (b"ZSCORE", permits, self.token), (b"HGET", state, b"=" + self.token)
        return ((b"GET", *self.watched()),)

    def loss(self, weight: int, answers: Sequence[Reply], time: int) -> LossReason | None:
        """Return why it is lost, by the answers of the server at its ``time`` (microseconds); None if it is held.

        ``weight`` is the number of permits that its holder believes to have.
        """
        if not isinstance(self.keys, PermitKeys):
            (holder,) = answers
            return None if holder == self.token else "expired" if holder is None else "taken"
        until, permit = answers
        # Weight 0 is a tombstone, and a writer may have become a reader. Otherwise the weight does not matter: the same
        # identity may have asked again, for more or less.
        found = 0 if permit is None else int(permit.split(b" ", 1)[0])
        enough = found == weight if weight == WRITER_WEIGHT else found > 0
        return None if until is not None and float(until) > time and enough else "expired"


class Owned(Protocol):
    """The part of a grant that a guard needs."""

    keys: Keys
    wire_token: bytes
    weight: int

    @property
    def name(self) -> str: ...
    def check(self) -> None: ...
    def committing(self, number: int, /) -> None: ...
    def lose(self, reason: LossReason, /) -> None: ...
    def loss(self) -> LeaseLost: ...


class GrantGuard:
    """The guard of `Lease.transaction`: the server confirms that all ``members`` of a grant are held."""

    def __init__(
        self,
        grant: Owned,
        members: Sequence[Owned],
        *,
        retry_for: float,
        exit_timeout: float,
        response_timeout: float | None,
    ) -> None:
        self._grant = grant
        self._members = [(member, Ownership(member.keys, member.wire_token)) for member in members]
        self.keys = tuple(key for _, ownership in self._members for key in ownership.watched())
        self.name = grant.name
        self.retry_for = retry_for
        self.exit_timeout = exit_timeout
        self.response_timeout = response_timeout
        self.check = grant.check
        self.committing = grant.committing

    def commands(self) -> Sequence[Words]:
        """Return the commands that ask for the members, and TIME."""
        return [(b"TIME",), *(words for _, ownership in self._members for words in ownership.questions())]

    def verify(self, replies: Sequence[Reply]) -> None:
        """Raise LeaseLost if one of the members is lost, after noting the loss."""
        clock, *rest = replies
        time = microseconds(clock)
        answers = iter(rest)
        for member, ownership in self._members:
            reason = ownership.loss(member.weight, [next(answers) for _ in ownership.questions()], time)
            if reason is not None:
                member.lose(reason)
                raise self._grant.loss()
