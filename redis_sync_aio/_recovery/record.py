"""Robust locks: the record that outlives its holder, undo steps, and the lease that has both.

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

import asyncio
import inspect
import json
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import ReferenceType

import anyio

from .._client.replies import Argument, Reply
from .._core import logs
from .._core.arguments import Json, Seconds, is_async, positive_seconds
from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.display import shown, text
from .._leases.grant import Grant
from .._leases.lease import GuardingLease
from .._leases.settings import HELD, LeaseState
from .._scripts.constants import Renewed
from .._transport.call import Call
from ..errors import CommandRefused, NotHeld, StaleWriter, SyncError, UndoFailed, UnknownStep, WrongKeyType

if TYPE_CHECKING:
    from .._leases.renewals import Sent
    from .._leases.resource import Resource

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


def read_json(progress: bytes, undo: bytes) -> tuple[dict[str, Json] | None, tuple[Step, ...]]:
    """Return progress and steps of a record. Raises if we cannot have written it, and so could not write it again."""
    found = json.loads(progress) if progress else None
    steps = tuple(Step(name, arguments) for name, arguments in (json.loads(undo) if undo else ()))
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


# -- Undo steps, run to their end within a time, whatever happens to the task that waits for them; errors are collected
#
# Each step runs in a task of its own, so a cancellation only reaches the waiting task, which keeps waiting and
# re-raises it afterwards. A cancelled anyio scope repeats its cancellation at every await; a shielded scope around
# the wait keeps that from spinning the loop. Native cancellations pass through a shield, each once.


UndoStep: TypeAlias = Callable[..., Awaitable[object]]
"""A coroutine function that undoes one step of some work."""
F = TypeVar("F", bound=UndoStep)

GRACE = 1.0
"""Seconds for a step to end after it ran out of time and was cancelled. After that it is left behind."""

_left_behind: set[asyncio.Task[object]] = set()
"""Steps that did not end although they were cancelled. The event loop itself does not keep them alive."""


class UndoSteps(Mapping[str, UndoStep]):
    """Undo steps by name: what a process can run for another one that crashed.

    The names are stored on the server, so keep them when the functions are renamed; and keep a step as long as it
    may be recorded somewhere. Any Mapping of names to coroutine functions will do as well.

    Example:
        ```python
        from redis_sync_aio.types import UndoSteps

        steps = UndoSteps()

        @steps.step("refund")
        async def refund(*, order_id: int) -> None:
            await payments.refund(idempotency_key=f"refund-{order_id}")
        ```
    """

    def __init__(self) -> None:
        self._steps: dict[str, UndoStep] = {}

    def step(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a coroutine function under ``name``, and leaves it as it is.

        Raises:
            TypeError: The name is not text, or what is decorated is not a coroutine function.
            ValueError: The name is taken, or empty.
        """
        if not isinstance(name, str):
            raise TypeError(f'a step needs a name, as in @steps.step("refund"), not {shown(name)}')
        if not name or name in self._steps:
            raise ValueError(f"the name of a step must be new and not empty, not {shown(name)}")

        def register(function: F) -> F:
            self._steps[name] = check_function(function, name)
            return function

        return register

    def __getitem__(self, name: str) -> UndoStep:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def check_function(function: F, what: str) -> F:
    """Return ``function``; raise TypeError unless it is a coroutine function, or an object that is called as one."""
    if not is_async(function):
        raise TypeError(f"the undo step {what} must be a coroutine function (async def), not {shown(function)}")
    return function


def check_arguments(function: Callable[..., object], what: str, /, *args: object, **kwargs: object) -> None:
    """Raise TypeError unless ``function`` takes these arguments. Once it has to run it is too late for that."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # written in C, so its arguments are unknown
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"the undo step {what} cannot be called like this: {error}") from None


def check_registry(registry: Mapping[str, UndoStep]) -> Mapping[str, UndoStep]:
    """Return ``registry``; raise TypeError unless it maps names to coroutine functions."""
    if not isinstance(registry, Mapping):
        raise TypeError(f"expected UndoSteps, or a dict of names and coroutine functions, not {shown(registry)}")
    for name, function in registry.items():
        check_function(function, name)
    return registry


def check_names(names: Iterable[str], registry: Mapping[str, UndoStep], lock: str) -> None:
    """Raise UnknownStep unless all ``names``, which the record of ``lock`` has, are registered."""
    unknown = tuple(dict.fromkeys(name for name in names if name not in registry))
    if unknown:
        raise UnknownStep(name=lock, steps=unknown, known=tuple(sorted(registry)))


class UndoRunner:
    """Runs steps one after the other for the current task, which may be cancelled meanwhile.

    ``cancelled`` is the first cancellation that arrived, ``errors`` are those of the steps. ``stop`` is the first one
    that is no Exception, such as KeyboardInterrupt: it is raised when the other steps have run.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.cancelled: asyncio.CancelledError | None = None
        self.stop: BaseException | None = None
        self.errors: list[Exception] = []
        self.count = 0

    async def run(self, what: str, work: Coroutine[Any, Any, object]) -> bool:
        """Run one step to its end; return whether it succeeded."""
        self.count += 1
        overdue = False
        task = asyncio.get_running_loop().create_task(work, name=f"redis_sync_aio undo {what}")
        with anyio.CancelScope(shield=True):
            await self._wait(task, self._timeout)
            overdue = not task.done()
            if overdue:
                task.cancel()
                await self._wait(task, GRACE)
        error = _error(task, what, self._timeout if overdue else None)
        if isinstance(error, Exception):
            self.errors.append(error)
        else:
            self.stop = self.stop or error
        return error is None

    async def _wait(self, task: asyncio.Task[object], seconds: float) -> None:
        ends = now() + seconds
        while not task.done() and (left := ends - now()) > 0:
            try:
                await asyncio.wait([task], timeout=left)
            except asyncio.CancelledError as error:
                self.cancelled = self.cancelled or error  # the wait is bounded, and the caller re-raises it

    def failure(self, *, lock: str = "", after: str = "") -> UndoFailed | None:
        """Return the errors as one error, and log it; None if there are none. See `UndoFailed.of_steps`."""
        if not self.errors:
            return None
        failed = UndoFailed.of_steps(self.errors, steps=self.count, lock=lock, after=after)
        logs.log("undo_failed", raised=failed, what=failed.message)
        return failed


def _error(task: asyncio.Task[object], what: str, overdue: float | None) -> BaseException | None:
    if not task.done():
        _left_behind.add(task)
        task.add_done_callback(_ended_late)
        assert overdue is not None  # only a time limit leaves a task unfinished
        return UndoFailed.too_long(what, seconds=overdue, ended=False)
    if task.cancelled():
        if overdue is not None:
            return UndoFailed.too_long(what, seconds=overdue, ended=True)
        return SyncError(f"the undo step {what} was cancelled")
    return task.exception()


def _ended_late(task: asyncio.Task[object]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logs.log("undo_ended_late", raised=error, step=task.get_name())


async def compensate(lease: RobustGrant, registry: Mapping[str, UndoStep], timeout: float) -> None:
    """Run the recorded steps in reverse and clear the record; see `RobustLease.compensate`."""
    check_names((step.name for step in lease.steps), check_registry(registry), lease.name)
    undoing = UndoRunner(timeout)
    for step in reversed(lease.steps):
        if undoing.cancelled is not None or not lease.remaining() or lease.superseded:
            break  # the rest stays recorded for the next holder
        await undoing.run(step.name, lease.undo_step(registry[step.name], step))
    failure = undoing.failure(lock=lease.name)
    if undoing.cancelled is not None:
        if failure is not None:
            undoing.cancelled.add_note(f"redis_sync_aio: {failure}")
        raise undoing.cancelled  # the same object: anyio knows its own by the message
    if undoing.stop is not None:
        raise undoing.stop
    lease.check()
    if failure is not None:
        raise failure
    if not undoing.count:
        lease.check_writer()
        await lease.clear_record()


# -- The grants of robust locks, which have the record, and their leases ---------------------------------------


class RobustGrant(Grant):
    """A grant of a robust lock, with the record of the protected work as this lease knows it.

    Invariant: all of the record was sent, or is sent by the next write.
    """

    writer: bytes = b""
    """A name that tells this lease from others of the same identity. Empty until the adoption of the record is sent."""
    adopted = False
    """True once the server has confirmed the adoption, which is before the acquisition returns."""
    superseded: bool = False
    """True if another lease of the same identity writes the record now."""
    abandoned: Abandoned | None = None
    progress: dict[str, Json] | None = None
    steps: tuple[Step, ...] = ()
    _sound: tuple[dict[str, Json] | None, tuple[Step, ...]] = None, ()  # without writes that were refused
    _seq = 0  # of our latest write

    async def adopt(self, by: float) -> None:
        """Replace the record that is there, by ``by`` (local clock)."""

        def answered(call: Call) -> SyncError | None:
            error = self._connection_error(0, None, call)
            return error if error is not None else self._take(call.reply)

        self.writer = os.urandom(6).hex().encode()
        words = (self.fence, self.ttl_ms, self.writer)

        await self.manager.hub.manager.ask(
            self,
            lambda commands, call: commands.adopt(self.keys, self.wire_token, words, call),
            answered,
            by,
        )

    def _take(self, reply: Reply) -> SyncError | None:
        """Take over the record that was there; return the error if it is not ours."""
        _, _, before, seq, progress, undo = reply
        try:
            self.progress, self.steps = read_json(progress, undo)
            if before:
                fence, micros, token = before.split(b" ", 2)
                at = EPOCH + timedelta(microseconds=int(micros))
                names = tuple(step.name for step in self.steps)
                self.abandoned = Abandoned(text(token), int(fence), at, self.progress, names)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            key = text(self.keys.all[-1])
            return WrongKeyType.not_ours(self.name, what="the record", key=key, problem=str(error))
        self._seq, self._sound = seq, (self.progress, self.steps)
        return None

    def check_writer(self) -> None:
        """Raise LeaseLost, NotHeld or StaleWriter unless this lease may write the record."""
        self.check_context()
        self.check()
        if self.superseded:
            raise StaleWriter(name=self.name, identity=self.identity, fence=self.fence)

    # -- recording -------------------------------------------------------------------------------------

    def record(self, progress: Mapping[str, object]) -> Awaitable[None]:
        """Record ``progress`` instead of the one before."""
        return self._write(checked(progress, "progress"), self.steps)

    def add_step(self, step: Step) -> Awaitable[None]:
        """Record one more step."""
        return self._write(self.progress, (*self.steps, step))

    async def drop_steps(self, done: Iterable[Step]) -> None:
        """Record that some steps are not needed any more, as the work that they undo is complete.

        If that fails, the next write records them again, since the record does not say that the work is complete.
        """
        gone = dict.fromkeys(done)
        try:
            await self._write(self.progress, tuple(step for step in self.steps if step not in gone))
        except SyncError:
            self.steps = (*self.steps, *(step for step in gone if step not in self.steps))
            self._sound = self._sound[0], self.steps
            raise

    def clear_record(self) -> Awaitable[None]:
        """Record neither progress nor undo steps."""
        return self._write(None, ())

    async def undo_step(self, function: UndoStep, step: Step) -> None:
        """Run a recorded step, and record that it was run. After a crash in between it is run once more.

        After the last one all work is undone, so the progress is cleared, too.
        """
        await function(**step.arguments)
        left = tuple(other for other in self.steps if other is not step)
        await self._write(self.progress if left else None, left)

    def _write(self, progress: dict[str, Json] | None, steps: tuple[Step, ...]) -> Awaitable[None]:
        # This part runs in the call itself, so that a value that cannot be recorded is refused and changes nothing.
        words = (_dump(progress, "progress"), _dump([[step.name, step.arguments] for step in steps], "undo steps"))
        # Without an await: the next write of another task follows this one on the wire, and includes it.
        self.progress, self.steps = progress, steps
        self._seq += 1
        manager, number = self.manager.hub.manager, self._seq
        ttl = manager.renewals.due(self)
        record: tuple[Argument, ...] = (self.fence, ttl, self.ttl_ms, number, *words, self.writer)
        sent = manager.renewals.begin(self, ttl) if ttl else None

        def answered(call: Call) -> SyncError | None:
            error = self._connection_error(ttl, sent, call)
            if not isinstance(error, (CommandRefused, StaleWriter)) or call.ambiguous:
                self._sound = progress, steps
            elif number == self._seq:  # it changed nothing, and no later write includes it
                self.progress, self.steps = self._sound
            return error

        return manager.ask(
            self, lambda commands, call: commands.record(self.keys, self.wire_token, record, call), answered
        )

    def _connection_error(self, ttl: int, sent: Sent | None, call: Call) -> SyncError | None:
        """Return the error of a command about the record, which renewed the lease by ``ttl`` milliseconds."""
        manager = self.manager.hub.manager
        if sent is not None:
            manager.renewals.settle(self, sent, call)
            if self.state is HELD:
                manager.keep(self)
        if self.state is LeaseState.LOST:
            return self.loss()
        if call.error is not None:
            return call.error
        if call.reply[0] == Renewed.SUPERSEDED:
            self.superseded = True
            return StaleWriter(name=self.name, identity=self.identity, fence=self.fence)
        error = manager.renewals.apply_answer(self, ttl, call)
        if error is None and self.state is not HELD and call.reply[0] != Renewed.RENEWED:
            return NotHeld.released(self.name, before="this was recorded")
        return error

    # -- the end ---------------------------------------------------------------------------------------

    def release_args(self) -> tuple[Argument, ...]:
        """Return the trailing arguments of its release: the writer of the record, and whether it must be kept.

        It is deleted if the holder released the lock, and no body under it failed. A lease that is lost, or taken away,
        is not released by its holder.
        """
        if not self.writer:
            return ()
        finished = self.adopted and not self.body_failed and self.state is LeaseState.RELEASING
        return self.writer, b"0" if finished else b"1"


class RobustLease(GuardingLease):
    """A lease of an `AsyncRobustLock`. Its record outlives it if it ends without a clean release.

    It is a [`GuardingLease`][redis_sync_aio.types.GuardingLease], and has all that such a lease has.
    """

    def __init__(self, grant: RobustGrant, maker: ReferenceType[object]) -> None:
        """Wrap ``grant`` of the primitive ``maker``. The package makes leases; you get one from ``acquire()``."""
        super().__init__(grant, maker)
        self._robust = grant

    @property
    def abandoned(self) -> Abandoned | None:
        """The work that the last holder left behind. None: it ended by a clean release.

        A release is not clean in three cases: the body of ``async with`` ended by an exception, undo steps are left, or
        another lease of the same identity has adopted the record since.

        The value is what was found at the grant, and does not change. If the same identity acquires the lock again,
        that lease finds under `progress` what this one has recorded since.
        """
        return self._robust.abandoned

    @property
    def progress(self) -> dict[str, Json] | None:
        """The progress that was recorded last, by this lease or by an abandoned one before it. None: none was.

        It changes with each `record` of this lease that the server has confirmed.
        """
        return self._robust.progress

    async def record(self, progress: Mapping[str, object]) -> None:
        """Record how far the work has come, so that the next holder knows if this one ends without a release.

        It replaces what was recorded before, except undo steps, and a clean release deletes it. One round trip, which
        also renews the lease (if the lock does that), and records only if the lease still holds.

        Args:
            progress: A dict that JSON can represent, at most 65,536 bytes.

        Raises:
            TypeError, ValueError: JSON cannot represent it, or it is too large or nested more than 100 levels deep.
                Nothing was sent.
            LeaseLost: The lease was lost already. Nothing was recorded.
            NotHeld: The lease was released.
            StaleWriter: Another lease of the same identity adopted the record later. Nothing was recorded.
            CommandRefused: The server answered with an error.
            Unreachable: The server did not answer. The progress may or may not be recorded.

        On cancellation the recording continues in the background.

        Example:
            ```python
            from redis_sync_aio import AsyncRobustLock

            async with AsyncRobustLock(redis, "order:7") as lease:
                if lease.abandoned:
                    await finish_or_undo(lease.progress)
                await lease.record({"charged": 120})
            ```
        """
        self._robust.check_writer()
        await self._robust.record(progress)

    async def compensate(self, steps: Mapping[str, UndoStep], *, timeout: Seconds = 10.0) -> None:
        """Run the undo steps that an abandoned holder has recorded, in reverse order, and clear the record.

        Each step is removed from the record after it ran, and the progress with the last one. A crash or a loss of the
        lease in the middle therefore leaves the rest to the next holder. A step may run although the action that it
        undoes did not happen, and it may run twice: write steps that do no harm then. A step that fails stays in the
        record, even after a release, and the others are run.

        Call this before the own work of the lease begins: it would undo that, too.

        Args:
            steps: Functions by name, as `UndoSteps`. All names that are recorded must be there.
            timeout: How long each step may take, the recording of its end included (seconds).

        Raises:
            UnknownStep: A name is missing. Nothing was run.
            UndoFailed: Some steps raised, or took too long; a group of their errors.
            TypeError, ValueError: An argument is bad. Nothing was run.
            LeaseLost, NotHeld, StaleWriter, CommandRefused, Unreachable: As for `record`.

        On cancellation the present step is finished (within ``timeout``) and recorded. Then the cancellation continues.
        """
        self._robust.check_writer()
        await compensate(self._robust, steps, positive_seconds(timeout, "timeout"))

    async def clear_record(self) -> None:
        """Delete progress and undo steps, as a clean release would. Errors and cancellation are those of `record`."""
        self._robust.check_writer()
        await self._robust.clear_record()


def robust_grant_of(lease: RobustLease) -> RobustGrant:
    """Return the grant that ``lease`` is the face of."""
    return lease._robust


async def adopting(granting: Awaitable[Grant | None], resource: Resource, within: float | None) -> RobustGrant | None:
    """Await a grant of a robust lock, and adopt its record. A grant that is not adopted is given back.

    Both have ``within`` seconds. A grant that came in time has the time of one more answer.
    """
    ends = math.inf if within is None else now() + within
    lease = await granting
    if lease is None:
        return None
    assert isinstance(lease, RobustGrant)  # the request asked for one
    try:
        await lease.adopt(max(ends, now() + resource.hub.options.response_timeout))
    except BaseException:
        undo_in(resource.hub.loop, partial(_not_adopted, resource, lease))
        raise
    lease.adopted = True
    return lease


def _not_adopted(resource: Resource, lease: RobustGrant) -> None:
    """Give back a grant whose adoption was cancelled, refused or lost, or got no answer.

    The release follows the adoption on the wire, and puts back the record that the adoption may have replaced.
    """
    lease.joined |= lease.superseded  # by another lease of the identity, which still has it
    if lease.identity is not None:  # make the lease that adopted the record before this one its writer again
        words = (lease.fence, lease.ttl_ms, lease.writer, 1)
        resource.hub.manager.releases.send(
            lambda commands, call: commands.adopt(lease.keys, lease.wire_token, words, call),
            now() + resource.hub.retry_for,
        )
    resource.decline(lease)
