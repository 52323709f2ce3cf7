"""Two grants on one permit: that of a reader, and that of the writer which it was upgraded to."""

from __future__ import annotations

from .._client.resp import Argument
from .grant import Grant
from .terms import HELD, IdentityReleases


class UpgradedGrant(Grant):
    """The writer's grant of an upgrade. Its release is a downgrade: the reader's goes on.

    It has the token of the reader, and never lasts longer: what ends the reader's grant ends this one first.
    """

    _reader: Grant | None = None
    """The grant that it stands on; None until the upgrade is known to have succeeded."""

    def stand_on(self, reader: Grant) -> None:
        """Stand on ``reader``, which was upgraded, and last no longer than it."""
        self._reader = reader
        self.hold_limit: float = reader.ends_by()
        self.same_identity: IdentityReleases | None = reader.same_identity
        reader.permit.above = reader.above = self

    @property
    def permit(self) -> Grant:
        """The grant that the server knows: that of the reader."""
        return self if self._reader is None else self._reader.permit

    def is_forgotten(self) -> bool:
        """Return True if nothing is left that could release it, or the reader's grant."""
        return super().is_forgotten() and (self._reader is None or self._reader.is_forgotten())

    def stands(self) -> bool:
        """Return whether the reader's grant is still held."""
        return self._reader is None or self._reader.state is HELD

    def latest_end(self) -> float:
        """Return until when the reader's grant may last (local clock)."""
        return self.hold_limit if self._reader is None else self._reader.ends_by()

    def shares_end(self) -> bool:
        """Return whether an extension is one of the permit: not if the reader's is a share of it."""
        return self._reader is None or self._reader is self.permit

    def release_args(self) -> tuple[Argument, ...]:
        """Return what its release says: which upgrade it ends."""
        return (self.attempt,)

    def _report_loss(self, tasks: int = 1) -> None:
        if self._reader is None or self._reader.reason is None:  # else the loss of the reader is reported
            super()._report_loss(tasks)
