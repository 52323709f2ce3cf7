"""The record of a robust lock, which outlives its holder (modelled on robust mutexes and EOWNERDEAD).

The record stands next to the lock. It says who holds it, and has the progress and the undo steps of the work. After
each grant one more command *adopts* it. If the record belongs to another holder, that one ended without a release. Our
record takes its place and keeps the progress until we record our own, so a second crash loses nothing. A crash between
grant and adoption did no work, so it is right that the older record stays. A clean release deletes the record in the
same script.

The record is sent as a whole each time, with a number that rises, so that a late copy cannot overwrite a later one. An
identity may have several leases at a time, in one process or in many, and none of them knows what the others record. So
the server decides: each adoption names its lease as the writer of the record, and the writes of earlier writers are
refused (`StaleWriter`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from .._client.resp import Argument, Reply
from .._core.arguments import Json
from .._core.display import text
from .._leases.terms import HELD, LeaseState
from .._scripts.constants import Renewed
from .._transport.call import Call
from ..errors import CommandRefused, NotHeld, StaleWriter, SyncError, WrongKeyType

if TYPE_CHECKING:
    from .._leases.grant import Grant
    from .._leases.in_flight import Sent
    from .._leases.manager import GrantManager

MAX_BYTES = 65_536
"""Most bytes of progress as JSON, and of undo steps."""
MAX_DEPTH = 100
"""Most levels of nested dicts and lists: far fewer than any Python can read back."""
MAX_BITS = 14_000
"""Most bits of a whole number: every Python reads its decimal digits back."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The work that the last holder of a robust lock left behind when it ended without a clean release.

    Attributes:
        token: The token of that holder, which begins with its host and process; or its identity.
        fence: The fence of its lease.
        at: When it last wrote its record, by the server's clock: when it got the lock, or recorded something.
        progress: The progress that was recorded last, by it or by an abandoned holder before it. None: nothing was.
        steps: The names of the recorded undo steps that were not run, in order.
    """

    token: str
    fence: int
    at: datetime
    progress: dict[str, Json] | None
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An undo step: the name of a function, and its arguments."""

    name: str
    arguments: dict[str, Json]


class WorkRecord:
    """The record as its holder knows it.

    Invariant: all of it was sent, or is sent by the next write.
    """

    abandoned: Abandoned | None = None
    progress: dict[str, Json] | None = None
    superseded: bool = False
    """Whether another lease of the same identity writes the record now."""
    _seq = 0  # of our latest write

    def __init__(self, manager: GrantManager) -> None:
        self._manager = manager
        self.writer: bytes = os.urandom(6).hex().encode()
        """A name that tells this lease from others of the same identity."""
        self.steps: list[Step] = []
        self._sound: tuple[dict[str, Json] | None, list[Step]] = None, []  # without writes that were refused

    async def adopt(self, lease: Grant, by: float) -> None:
        """Replace the record that is there, by ``by`` (local clock)."""

        def answered(call: Call) -> SyncError | None:
            error = self._connection_error(lease, 0, None, call)
            return error if error is not None else self._adopted(lease, call.reply)

        words = (lease.fence, lease.ttl_ms, self.writer)

        await self._manager.ask(
            lease,
            lambda commands, delivery: commands.adopt(lease.keys, lease.wire_token, words, delivery),
            answered,
            by,
        )

    def _adopted(self, lease: Grant, reply: Reply) -> SyncError | None:
        _, _, before, seq, progress, undo = reply
        try:
            self.progress, self.steps = read_json(progress, undo)
            if before:
                fence, micros, token = before.split(b" ", 2)
                at = EPOCH + timedelta(microseconds=int(micros))
                names = tuple(step.name for step in self.steps)
                self.abandoned = Abandoned(text(token), int(fence), at, self.progress, names)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            key = text(lease.keys.all[-1])
            return WrongKeyType.not_ours(lease.name, what="the record", key=key, problem=str(error))
        self._seq, self._sound = seq, (self.progress, self.steps)
        return None

    def check_writer(self, lease: Grant) -> None:
        """Raise LeaseLost, NotHeld or StaleWriter unless ``lease`` may write the record."""
        lease.check_context()
        lease.check()
        if self.superseded:
            raise StaleWriter(name=lease.name, identity=lease.identity, fence=lease.fence)

    # -- recording -------------------------------------------------------------------------------------

    def set_progress(self, lease: Grant, progress: Mapping[str, object]) -> Awaitable[None]:
        """Record ``progress`` instead of the one before."""
        return self._write(lease, checked(progress, "progress"), self.steps)

    def add(self, lease: Grant, step: Step) -> Awaitable[None]:
        """Record one more step."""
        return self._write(lease, self.progress, [*self.steps, step])

    async def drop(self, lease: Grant, done: Iterable[Step]) -> None:
        """Record that some steps are not needed any more, as the work that they undo is complete.

        If that fails, the next write records them again, since the record does not say that the work is complete.
        """
        gone = dict.fromkeys(done)
        try:
            await self._write(lease, self.progress, [step for step in self.steps if step not in gone])
        except SyncError:
            self.steps = [*self.steps, *(step for step in gone if step not in self.steps)]
            self._sound = self._sound[0], self.steps
            raise

    def undone(self, lease: Grant, step: Step) -> Awaitable[None]:
        """Record that a step was run. After the last one all work is undone, so the progress is cleared, too."""
        left = [other for other in self.steps if other is not step]
        return self._write(lease, self.progress if left else None, left)

    def clear(self, lease: Grant) -> Awaitable[None]:
        """Record neither progress nor undo steps."""
        return self._write(lease, None, [])

    def _write(self, lease: Grant, progress: dict[str, Json] | None, steps: list[Step]) -> Awaitable[None]:
        # This part runs in the call itself, so that a value that cannot be recorded is refused and changes nothing.
        words = (_dump(progress, "progress"), _dump([[step.name, step.arguments] for step in steps], "undo steps"))
        # Without an await: the next write of another task follows this one on the wire, and includes it.
        self.progress, self.steps = progress, steps
        self._seq += 1
        number = self._seq
        ttl = self._manager.renewals.due(lease)
        record: tuple[Argument, ...] = (lease.fence, ttl, lease.ttl_ms, self._seq, *words, self.writer)
        sent = self._manager.renewals.begin(lease, ttl) if ttl else None

        def answered(call: Call) -> SyncError | None:
            error = self._connection_error(lease, ttl, sent, call)
            if not isinstance(error, (CommandRefused, StaleWriter)) or call.ambiguous:
                self._sound = progress, steps
            elif number == self._seq:  # it changed nothing, and no later write includes it
                self.progress, self.steps = self._sound
            return error

        return self._manager.ask(
            lease, lambda commands, delivery: commands.record(lease.keys, lease.wire_token, record, delivery), answered
        )

    def _connection_error(self, lease: Grant, ttl: int, sent: Sent | None, call: Call) -> SyncError | None:
        """Return the error of a command about the record of ``lease``, which renewed it by ``ttl`` milliseconds."""
        if sent is not None:
            self._manager.renewals.settle(lease, sent, call)
        if lease.state is LeaseState.LOST:
            return lease.loss()
        if call.error is not None:
            return call.error
        if call.reply[0] == Renewed.SUPERSEDED:
            self.superseded = True
            return StaleWriter(name=lease.name, identity=lease.identity, fence=lease.fence)
        error = self._manager.renewals.apply_answer(lease, ttl, call)
        if error is None and lease.state is not HELD and call.reply[0] != Renewed.RENEWED:
            return NotHeld.released(lease.name, before="this was recorded")
        return error


# -- JSON ----------------------------------------------------------------------------------------------------


def checked(value: Mapping[str, object], what: str) -> dict[str, Json]:
    """Return a copy of ``value`` that went through JSON. Raises TypeError or ValueError if JSON cannot express it."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict with text as keys, not {value!r}")
    given = dict(value)
    written = _dump(given, what)
    _check_limits(given, what)
    copy: dict[str, Json] = json.loads(written)
    if copy != given:
        raise TypeError(f"{what} would not come back from JSON as it is (tuples, keys that are not text): {given!r}")
    return copy


def read_json(progress: bytes, undo: bytes) -> tuple[dict[str, Json] | None, list[Step]]:
    """Return progress and steps of a record. Raises if we cannot have written it, and so could not write it again."""
    found = json.loads(progress) if progress else None
    steps = [Step(name, arguments) for name, arguments in (json.loads(undo) if undo else ())]
    for step in steps:
        if not isinstance(step.name, str) or not isinstance(step.arguments, dict):
            raise TypeError(f"an undo step must have a name and a dict of arguments, not {step!r:.200}")
        _check_limits(step.arguments, "a step")
    if progress:
        if not isinstance(found, dict):
            raise TypeError(f"progress must be a dict, not {found!r:.200}")
        _check_limits(found, "progress")
    _dump(found, "progress")
    _dump([[step.name, step.arguments] for step in steps], "undo steps")
    return found, steps


def _check_limits(value: object, what: str) -> None:
    """Raise ValueError if another Python could not read ``value``, which does not contain itself."""
    level = [value]
    for _ in range(MAX_DEPTH + 2):
        if not level:
            return
        if any(isinstance(one, int) and one.bit_length() > MAX_BITS for one in level):
            raise ValueError(f"{what} has a whole number of more than {MAX_BITS:,} bits: record it as text")
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list, tuple))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    raise ValueError(f"{what} is nested more than {MAX_DEPTH} levels deep: record a reference, or less deep data")


def _dump(value: object, what: str) -> bytes:
    if not value and value != {}:
        return b""
    try:
        found = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply for JSON") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what} cannot be recorded: {error}") from error
    if len(found) > MAX_BYTES:
        raise ValueError(
            f"{what} must have at most {MAX_BYTES:,} bytes as JSON, not {len(found):,}: record a reference"
        )
    return found
