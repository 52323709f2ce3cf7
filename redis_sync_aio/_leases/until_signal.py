"""The end of a program by a signal: first its leases drain, then its body is cancelled, then the signal takes effect.

The handlers are Python's own (`signal.signal`), not the loop's: those can be restored. What was there before the block
is back from the first signal on, so a second one has the effect that it has without the block.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TypeAlias

from .._core.cancellation import cancelled
from ..errors import CoordinatorClosed
from .hold import CancelOnLoss
from .hub import Hub
from .implicit import Binding

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | signal.Handlers | None"


class UntilSignal:
    """The context manager that `Coordinator.until_signal` returns."""

    _hub: Hub
    _task: asyncio.Task[object] | None = None
    """The task of the body; None before it was entered."""
    _cancellations = 0
    """Number of cancellations of the task when the body began."""
    _received: int | None = None
    """The first signal; None until it comes."""
    _ending: asyncio.Task[None] | None = None
    """Drains, and cancels the body, once a signal has come."""
    _guard: CancelOnLoss | None = None
    """Set when the body is cancelled."""
    _left = False
    """True once the body has ended."""

    def __init__(self, binding: Binding, drain: float) -> None:
        self._binding = binding
        self._drain = drain
        self._before: dict[int, Handler] = {}
        """The handlers that were there, by their signals."""

    async def __aenter__(self) -> None:
        if self._task is not None:
            raise RuntimeError("until_signal() was entered before: call it again")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("until_signal() needs the main thread: Python handles signals nowhere else")
        self._hub, self._task = self._binding.hub(), asyncio.current_task()
        assert self._task is not None
        self._cancellations = self._task.cancelling()
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:  # ignored, as in the background of a shell
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take the first signal. Python calls this between any two steps of the main thread."""
        self._restore()
        if self._left or self._received is not None:  # a handler that was installed later passes on what is not ours
            before = self._former(number)
            if callable(before):
                before(number, frame)
            elif signal.getsignal(number) is before:
                signal.raise_signal(number)
            return
        self._received = number
        with suppress(RuntimeError):  # the loop is closed
            self._hub.loop.call_soon_threadsafe(self._start)

    def _restore(self) -> None:
        """Put the former handlers back, unless others have replaced ours since."""
        for number in self._before:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, self._former(number))

    def _former(self, number: int) -> Handler:
        """Return the handler from before; not that of a block which began earlier and has been left earlier."""
        before = self._before[number]
        owner = getattr(before, "__self__", None)
        return owner._former(number) if isinstance(owner, UntilSignal) and owner._left else before

    def _start(self) -> asyncio.Task[None]:
        if self._ending is None:
            # Not by the loop's factory: an eager task could end before ``self._ending`` is set.
            self._ending = asyncio.Task(self._end(), loop=self._hub.loop, name="redis_sync_aio until_signal")
        return self._ending

    async def _end(self) -> None:
        """Drain the leases of the coordinator, then cancel the body."""
        await self._hub.closing.drain(self._drain, hold_back=True)
        assert self._task is not None
        assert self._received is not None
        if not self._left:  # else it waits for this
            self._guard = CancelOnLoss(self._task, self._cancellations, signal.Signals(self._received).name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._left = True
        self._restore()
        if self._received is None:
            return False
        ending = self._start()
        try:
            # A body that is cancelled may still end with a refusal that it met before. The drain has ended then, and
            # the cancellation is due again at the next await: there must be none until it is taken back.
            if self._guard is None and (error is None or _is_refusal(error)):
                await asyncio.wait([ending])  # other tasks may hold leases
        finally:
            await cancelled(ending)
            by_signal = self._guard is not None and self._guard.finish(error)
        if error is not None and not by_signal and not _is_refusal(error):
            return False
        await self._take_effect(self._received)
        return True

    async def _take_effect(self, number: int) -> None:
        """Let the signal have the effect that it has without the block; SIGTERM without a handler exits with 0."""
        before = self._former(number)
        if before is signal.SIG_DFL:
            raise SystemExit(0)
        if getattr(before, "__name__", "") != "_sighandler_noop":  # else the loop has called a handler of its own
            signal.raise_signal(number)
            await asyncio.sleep(0)  # that of `asyncio.run` cancels the main task


def _is_refusal(error: BaseException) -> bool:
    """Return True if ``error`` says that a coordinator grants nothing more, or is a group of such errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_refusal, error.exceptions))
    return isinstance(error, CoordinatorClosed)
