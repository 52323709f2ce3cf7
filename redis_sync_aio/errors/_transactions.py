"""Errors of transactions."""

from __future__ import annotations

from typing import Literal

from ._base import SyncError
from ._wording import listed


class Conflict(SyncError):
    """Others changed the watched keys in each attempt, until attempts or time were used up. Nothing was written.

    Allow more attempts or time, watch fewer keys, or let the transactions take turns (``escalate_after``).

    Attributes:
        attempts: How often the body ran.
        conflicts: How many attempts were not committed because another client had changed a watched key.
        elapsed: Seconds that all attempts took, the pauses between them included.
        keys: The keys that were watched.
    """

    def __init__(
        self,
        *,
        attempts: int,
        conflicts: int,
        elapsed: float,
        keys: tuple[str, ...],
        lease: str = "",
        more_attempts: bool = False,
        escalates: bool = False,
        turn_taken: bool = False,
    ) -> None:
        """Word the message.

        Args:
            attempts: The attribute.
            conflicts: The attribute.
            elapsed: The attribute.
            keys: The attribute.
            lease: The lock whose lease guarded the commit, if one did.
            mark: The mark of a job was written, and nothing else. ``keys`` has its key.
            more_attempts: The number of attempts was the limit; else the time was.
            escalates: The transaction takes turns after some conflicts.
            turn_taken: Others had the turn until the deadline.
        """
        if lease:
            found = f"others changed {listed(keys)}, or " if keys else ""
            found += (
                f"{lease!r} itself was touched meanwhile (renewed; a semaphore or read/write lock also acquired or "
                f"released by others), at each of {conflicts} commits"
            )
            advice = f"The lease on {lease!r} still holds: read and write again"
            advice += ", without tx.watch() for what the lock protects" if keys else " when there is less contention"
        else:
            what = [f"others had the turn on {listed(keys)} until the deadline"] if turn_taken else []
            if conflicts or not turn_taken:
                what.append(f"others changed {listed(keys)} during {conflicts} of {attempts} attempts")
            found = f"{', and before that '.join(what)}, in {elapsed:.3f} seconds"
            advice = self._less_conflicts(len(keys), conflicts, more_attempts, escalates)
        super().__init__(f"{found}: nothing was written. {advice}")
        self.attempts = attempts
        self.conflicts = conflicts
        self.elapsed = elapsed
        self.keys = keys

    @staticmethod
    def _less_conflicts(keys: int, conflicts: int, more_attempts: bool, escalates: bool) -> str:
        """Return advice that the caller does not follow already."""
        advice = ["allow more attempts" if more_attempts else "allow more time (deadline)"]
        if keys > 1:
            advice.append("watch fewer keys")
        if not escalates:
            advice.append("let it take turns with the others (escalate_after=3)")
        elif conflicts:
            advice.append("let all who often write these keys take turns, too (escalate_after)")
        return ", or ".join(advice).capitalize()


class OutcomeUnknown(SyncError):
    """EXEC was sent and its answer was lost. All writes of the transaction were made, or none.

    For a job (`once`): the answer to the writing of its mark was lost, and the mark was written or not.

    Look at the data. To have the transaction decide by itself, declare it ``idempotent=True`` or ``exactly_once=True``.

    Attributes:
        attempts: How often the body ran.
        keys: The keys that were watched.
    """

    def __init__(
        self,
        *,
        attempts: int,
        keys: tuple[str, ...],
        lease: str = "",
        mark: bool = False,
        declared: Literal["", "idempotent", "exactly_once"] = "",
        cancelled: bool = False,
        later_error: str = "",
        marker_error: str = "",
    ) -> None:
        """Word the message.

        Args:
            attempts: The attribute.
            keys: The attribute.
            lease: The lock whose lease guarded the commit, if one did.
            declared: What the caller declared about repeating the body.
            cancelled: The loop was cancelled while EXEC was in flight.
            later_error: The type of the error that ended a later run of the body; then an earlier EXEC is meant.
            marker_error: Why the marker that tells could not be read.
        """
        what = f"what was guarded by the lease on {lease!r}" if lease else f"the transaction on {listed(keys)}"
        if cancelled:
            advice = "it was cancelled inside the loop, with EXEC in flight. Look at the data"
        elif later_error:
            advice = f"a later run ended with {later_error}, which is the cause of this. Look at the data"
        elif marker_error:
            advice = f"the marker that tells could not be read: {marker_error}. Look at the data"
        elif declared == "idempotent":
            advice = "look at the data, or allow more attempts or time (deadline): it was not run again"
        elif declared == "exactly_once":
            advice = "look at the data: the marker that tells was out of reach"
        elif lease:
            advice = "look at the data"
        else:
            advice = "look at the data, or declare the body idempotent=True, or let a marker tell (exactly_once=True)"
        message = (
            f"the answer to {'an earlier ' if later_error else ''}EXEC was lost: {what} was committed as a whole, or "
            f"not at all; {advice}"
        )
        if mark:
            message = (
                f"the answer was lost: the mark {keys[0]!r} of the job {lease!r} was written, or not; call again, or "
                "look at the mark"
            )
        super().__init__(message)
        self.attempts = attempts
        self.keys = keys


class PartiallyApplied(SyncError):
    """Some commands of a transaction failed when they ran. The others were executed, and Redis does not undo them.

    A typical cause is a key of the wrong type. Also raised when all commands were executed and a reply cannot be read,
    and when the server refused MULTI and executed each command by itself.

    Attributes:
        replies: The reply of each command, in order. An exception stands for each that failed or cannot be read.
    """

    def __init__(
        self, *, replies: tuple[object, ...], command: str = "", index: int = 0, failed: int = 0, multi: str = ""
    ) -> None:
        """Word the message.

        Args:
            replies: The attribute.
            command: The name of the first command that failed; if none did, of the first whose reply cannot be read.
            index: Its index in ``replies``.
            failed: How many commands failed.
            multi: The error reply to MULTI, if that was refused and each command was executed on its own.
        """
        count = len(replies)
        which = f"command {index + 1} of {count} ({command})"
        if multi:
            message = (
                f"MULTI was refused: {multi}. The commands after it were executed one by one, watched by nothing; "
                "`replies` has their replies. Let this user run MULTI and EXEC"
            )
        elif failed:
            message = (
                f"{which} failed when it ran: {replies[index]}. {count - failed} of {count} commands were executed, "
                "and Redis does not take them back; `replies` has the details"
            )
        else:
            message = (
                f"all commands were executed, but the reply to {which} cannot be read: "
                f"{type(replies[index]).__name__}: {replies[index]}; `replies` has the others"
            )
        super().__init__(message)
        self.replies = replies
