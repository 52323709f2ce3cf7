"""Hold a lock for as long as a program runs, and end the program when the lock is lost."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeAlias

from redis_sync_aio import AcquireTimeout, Coordinator, LeaseLost, NotHeld, SyncError
from redis_sync_aio.errors import LimitMismatch
from redis_sync_aio.types import BaseLease

from .._failures import UNREACHABLE, USAGE, Failure
from .._output import complain
from .._session import Session
from .child import FORWARDED, Child

LOST = 75
"""EX_TEMPFAIL of sysexits.h."""
CANNOT_EXECUTE, NOT_FOUND = 126, 127
Side: TypeAlias = Literal["lock", "shared", "exclusive"]
OnLost: TypeAlias = Literal["term", "kill", "ignore"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of `run`."""

    name: str
    argv: Sequence[str]
    side: Side
    limit: int | None
    weight: int
    ttl: float
    wait: bool
    timeout: float | None
    conflict: int
    on_lost: OnLost
    grace: float


@dataclass(slots=True)
class Outcome:
    """The report that --json prints at the end."""

    name: str
    exit: int = 0
    waited: float = 0.0
    held: float | None = None
    fence: int | None = None
    lost: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return it as --json prints it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Holding:
    """One run: the signals that come, the lease, and the program."""

    session: Session
    plan: Plan
    outcome: Outcome = field(init=False)
    child: Child | None = field(init=False, default=None)
    interrupted: signal.Signals | None = field(init=False, default=None)
    """The signal that came before the program ran."""

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.plan.name)

    async def run(self) -> Outcome:
        """Acquire, run the program, release; return how that went."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the program ignores it, too
                loop.add_signal_handler(number, self._on_signal, number, task)
        loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        try:
            self.outcome.exit = await self._hold()
        except asyncio.CancelledError:
            if self.interrupted is None:
                raise
            task.uncancel()
            self.outcome.exit = 128 + self.interrupted
        return self.outcome

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        if self.child is not None:
            self.child.forward(number)
        elif self.interrupted is None:
            self.interrupted = number
            task.cancel()

    def _on_continue(self) -> None:
        if self.child is not None:
            self.child.go_on()

    async def _hold(self) -> int:
        began = monotonic()
        async with Coordinator(self.session.client, prefix=self.session.prefix) as sync:
            try:
                lease = await self._acquire(sync)
            except LimitMismatch as error:
                limit, found = self.plan.limit, error.found
                here = f"{self.plan.name!r}: its limit is {found}, not {limit}: give --limit {found}, as others do"
                raise Failure(str(error) if found in (None, limit) else here, USAGE) from None
            except ValueError as error:
                raise Failure(str(error), USAGE) from None
            except AcquireTimeout as error:
                command = f"look at the holders: redis-sync-aio show {shlex.quote(self.plan.name)}"
                complain(str(error).replace("look at statistics() for the holders", command))
                return self.plan.conflict if error.answered else UNREACHABLE
            finally:
                self.outcome.waited = round(monotonic() - began, 6)
            if lease is None:
                complain(f"{self.plan.name!r} is held by others, or others wait for it (--timeout S waits)")
                return self.plan.conflict
            self.outcome.fence = lease.fence
            return await self._run_under(lease)

    async def _acquire(self, sync: Coordinator) -> BaseLease | None:
        plan = self.plan
        acquire: Callable[..., Awaitable[BaseLease]]
        try_acquire: Callable[[], Awaitable[BaseLease | None]]
        if plan.limit is not None:
            semaphore = sync.semaphore(plan.name, limit=plan.limit, ttl=plan.ttl, on_lost="event")
            acquire = partial(semaphore.acquire, weight=plan.weight)
            try_acquire = partial(semaphore.try_acquire, weight=plan.weight)
        elif plan.side == "lock":
            lock = sync.lock(plan.name, ttl=plan.ttl, on_lost="event")
            acquire, try_acquire = lock.acquire, lock.try_acquire
        else:
            both = sync.read_write_lock(plan.name, ttl=plan.ttl, on_lost="event")
            side = both.read() if plan.side == "shared" else both.write()
            acquire, try_acquire = side.acquire, side.try_acquire
        return await (acquire(timeout=plan.timeout) if plan.wait else try_acquire())

    async def _run_under(self, lease: BaseLease) -> int:
        began = monotonic()
        code = UNREACHABLE
        try:
            try:
                self.child = child = Child(self.plan.argv, environment(lease))
            except OSError as error:
                complain(f"cannot run {self.plan.argv[0]!r}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
            try:
                code = await self._wait_for(child, lease)
            finally:
                child.take_terminal_back()
        finally:
            self.outcome.held = round(monotonic() - began, 6)
            code = await self._release(lease, code)
        return code

    async def _wait_for(self, child: Child, lease: BaseLease) -> int:
        """Return the exit code of the program; end it when the lease is lost."""
        lost = asyncio.create_task(lease.wait_lost(), name="redis_sync_aio run")
        try:
            either: set[asyncio.Future[Any]] = {lost, child.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not child.ended.done() and self.plan.on_lost != "ignore":
                number = signal.SIGTERM if self.plan.on_lost == "term" else signal.SIGKILL
                complain(f"the lock {lease.name!r} was lost: ending {self.plan.argv[0]!r} by {number.name}")
                await child.end(number, self.plan.grace)
            await child.end_descendants(self.plan.grace)
            return await child.ended
        finally:
            lost.cancel()

    async def _release(self, lease: BaseLease, code: int) -> int:
        """Release the lease and return the exit code: that of the program, unless the lease was lost meanwhile."""
        try:
            await lease.release()
        except (LeaseLost, NotHeld) as error:
            self.outcome.lost = getattr(error, "reason", "expired")
            complain(str(error))
            return code if self.plan.on_lost == "ignore" else LOST
        except SyncError as error:
            complain(f"the program has ended, but the lock was not released; it ends with its ttl: {error}")
        return code


def environment(lease: BaseLease) -> dict[str, str]:
    """Return the environment of the program."""
    own = {"NAME": lease.name, "FENCE": str(lease.fence), "TOKEN": lease.token}
    return os.environ | {f"REDIS_SYNC_AIO_{key}": value for key, value in own.items()}
