"""Errors of robust locks and their undo steps."""

from __future__ import annotations

from collections.abc import Sequence

from ._base import SyncError
from ._leases import NotHeld


class UnknownStep(SyncError, LookupError):
    """Undo steps are recorded under names that the registry does not have. No step was run.

    Register a function for each of the names, including old names that may still be recorded.

    Attributes:
        steps: The names of the recorded undo steps that the registry has no function for.
    """

    def __init__(self, *, name: str, steps: tuple[str, ...], known: tuple[str, ...]) -> None:
        """Word the message: ``known`` are the names that the registry of the lock ``name`` has."""
        super().__init__(
            f"undo steps of {name!r} have no function: {', '.join(steps)}; the registry has "
            f"{', '.join(known) or 'nothing'}. Nothing was run: register them (also under old names that may still be "
            "recorded)"
        )
        self.steps = steps


class UndoFailed(SyncError, ExceptionGroup[Exception]):
    """Some undo steps raised, or took too long. The other steps were run.

    It is an `ExceptionGroup`, so ``except*`` works. Repair by hand what those steps should have undone.

    Attributes:
        exceptions: The errors of the steps, in the order in which they ran.
    """

    @staticmethod
    def of_steps(errors: Sequence[Exception], *, steps: int, lock: str = "", after: str = "") -> UndoFailed:
        """Return the error for ``errors`` of so many ``steps``.

        They were recorded under ``lock``, or run after an error of the type ``after``.
        """
        about = f"for {lock!r}" if lock else f"after {after}"
        return UndoFailed(f"{len(errors)} of {steps} undo steps {about} failed", errors)

    @staticmethod
    def too_long(step: str, *, seconds: float, ended: bool) -> TimeoutError:
        """Return the error for a step that took longer than ``seconds``; ``ended``: its cancellation ended it."""
        then = " and was cancelled" if ended else ", and goes on although cancelled"
        return TimeoutError(f"the undo step {step} took longer than {seconds:g} seconds{then}")

    @staticmethod
    def cancelled(step: str) -> SyncError:
        """Return the error for a step that was cancelled, but not because it took too long."""
        return SyncError(f"the undo step {step} was cancelled")

    def derive(self, excs: Sequence[Exception]) -> UndoFailed:  # type: ignore[override]
        """Return a part of the group, for ``except*``."""
        return UndoFailed(self.message, excs)


class StaleWriter(NotHeld):
    """Another lease of the same identity adopted the record of the robust lock later, and is its writer from then on.

    This lease recorded nothing. It still holds the lock, together with the other one. Record by that lease, or acquire
    the lock again.

    Attributes:
        name: The name of the lock.
        fence: The fence of the lease that may not write the record any more.
    """

    def __init__(self, *, name: str, identity: str | None, fence: int) -> None:
        super().__init__(
            f"nothing was recorded under {name!r}: a later lease of the identity {identity!r} has adopted the record "
            f"and writes it now. Record by that lease, or acquire again (this lease has the fence {fence})"
        )
        self.name = name
        self.fence = fence
