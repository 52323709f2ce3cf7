"""Undo steps, run to their end within a time, whatever happens to the task that waits for them; errors are collected.

Each step runs in a task of its own, so a cancellation only reaches the waiting task, which keeps waiting and re-raises
it afterwards. A cancelled anyio scope repeats its cancellation at every await; a shielded scope around the wait keeps
that from spinning the loop. Native cancellations pass through a shield, each once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio

from .._core import logs
from .._core.arguments import is_async
from .._core.clock import now
from .._core.display import shown
from ..errors import UndoFailed, UnknownStep

if TYPE_CHECKING:
    from .._leases.grant import Grant
    from .record import Step, WorkRecord


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
        logs.undo_failed(failed, failed.message)
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
        return UndoFailed.cancelled(what)
    return task.exception()


def _ended_late(task: asyncio.Task[object]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logs.undo_ended_late(error, task.get_name())


async def undo_recorded(lease: Grant, record: WorkRecord, function: UndoStep, step: Step) -> None:
    """Run a recorded step, and record that it was run. After a crash in between it is run once more."""
    await function(**step.arguments)
    await record.undone(lease, step)


async def compensate(lease: Grant, record: WorkRecord, registry: Mapping[str, UndoStep], timeout: float) -> None:
    """Run the recorded steps in reverse and clear the record; see `RobustLease.compensate`."""
    check_names((step.name for step in record.steps), check_registry(registry), lease.name)
    undoing = UndoRunner(timeout)
    for step in reversed(tuple(record.steps)):
        if undoing.cancelled is not None or not lease.remaining() or record.superseded:
            break  # the rest stays recorded for the next holder
        await undoing.run(step.name, undo_recorded(lease, record, registry[step.name], step))
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
        record.check_writer(lease)
        await record.clear(lease)
