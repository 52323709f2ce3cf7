"""What a lease of a robust lock has beside the others: the record. See `_recovery.record`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from .._core.arguments import Json, Seconds, positive_seconds
from ..errors import NotRobust, StaleWriter
from .undo import UndoStep, compensate

if TYPE_CHECKING:
    from .._leases.lease import Lease
    from .record import Abandoned, WorkRecord


class Recorded:
    """The part of `Lease` that is about its record."""

    book: WorkRecord | None = None
    """The record, if the lock is robust."""

    @property
    def abandoned(self) -> Abandoned | None:
        """What the last holder of a robust lock left behind; None if it ended by a clean release.

        A release is not clean when the body of ``async with`` ends by an exception, when undo steps are left, or when
        another lease of the same identity has adopted the record since.
        It is what was found at the grant, and does not change; only who asks again with the same identity, for a
        lease that has recorded something since, finds that under `progress`.
        """
        return None if self.book is None else self.book.abandoned

    @property
    def progress(self) -> dict[str, Json] | None:
        """What was last recorded under this lock, by this lease or by abandoned ones before; None: nothing was."""
        return None if self.book is None else self.book.progress

    async def record(self, progress: Mapping[str, object]) -> None:
        """Record how far the work has come, so that the next holder knows if this one ends without a release.

        It replaces what was recorded before, and is deleted by a clean release. It is written in one command with a
        renewal (if the lock renews its leases), and only if the lease is still ours. Undo steps are kept apart.

        Args:
            progress: a dict that JSON can say, 65,536 bytes at most.

        Raises:
            TypeError, ValueError: JSON cannot say it, it is too large, or nested more than 100 levels deep; nothing was
                sent.
            NotRobust: the lock was not made with ``robust=True``.
            LeaseLost: it was gone already; nothing was recorded.
            NotHeld: it was released. StaleWriter: another lease of the same identity adopted the record later; nothing
                was recorded.
            CommandRefused: the server answered with an error. Unreachable: it did not answer; may be recorded or not.

        On cancellation the recording goes on in the background.

        Example:
            async with AsyncLock(redis, "order:7", robust=True) as lease:
                if lease.abandoned:
                    await finish_or_undo(lease.progress)
                await lease.record({"charged": 120})
        """
        book = self.robust()
        await book.set_progress(self._lease(), progress)

    async def compensate(self, steps: Mapping[str, UndoStep], *, timeout: Seconds = 10.0) -> None:
        """Run the undo steps that an abandoned holder has recorded, in reverse, and clear the record.

        Each step is removed from the record after it ran, and with the last one the progress. So a crash, or a loss
        of the lease, in the middle leaves the rest to the next holder. A step may be run when what it undoes did
        not happen, and it may be run twice: write steps that do no harm then. A step that fails stays in the
        record, also after a release, and the others are run. When nothing is recorded nothing is run.

        Call it before the work of this lease itself begins: it would undo that, too.

        Args:
            steps: functions by name, as `UndoSteps`; all names that are recorded must be there.
            timeout: seconds or timedelta for each step, the recording of its end included.

        Raises:
            UnknownStep: a name is missing. Nothing was run.
            UndoFailed: some steps raised, or took too long; a group of their errors.
            TypeError, ValueError: a bad argument; nothing was run.
            NotRobust, LeaseLost, NotHeld, StaleWriter, CommandRefused, Unreachable: as `record`.

        On cancellation the step under way is finished (within ``timeout``) and recorded; then the cancellation goes on.
        """
        await compensate(self._lease(), self.robust(), steps, positive_seconds(timeout, "timeout"))

    async def clear_record(self) -> None:
        """Forget progress and undo steps, as a clean release would; errors and cancellation as in `record`."""
        await self.robust().clear(self._lease())

    def robust(self) -> WorkRecord:
        """Return the record for a write. Raises NotRobust, LeaseLost, NotHeld or StaleWriter."""
        lease = self._lease()
        lease.check_context()
        if self.book is None:
            raise NotRobust(f"the lock {lease.name!r} keeps no record: make it with AsyncLock(..., robust=True)")
        lease.check()
        if self.book.superseded:
            raise StaleWriter(name=lease.name, identity=lease.identity, fence=lease.fence)
        return self.book

    def _lease(self) -> Lease:
        return cast("Lease", self)
