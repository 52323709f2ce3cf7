"""The command `run`: a program under a lock, in a process group of its own, in the words of flock(1).

- With the terminal at its standard input and output, the program gets the terminal: Ctrl-C and Ctrl-Z go to its group,
  and not to this process. When it is stopped, this process stops, too, as the shell that started it expects.
- In a pipeline (``… -- producer | less``) the terminal stays with the group of the pipeline, which the program joins.
  What the terminal sends reaches both, so it is not forwarded.
- Elsewhere the program has a group of its own, and signals of this process are forwarded to that, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from subprocess import Popen
from time import monotonic
from typing import Annotated, Any

import typer

from redis_sync_aio import AcquireTimeout, Coordinator, LeaseLost, NotHeld, SyncError
from redis_sync_aio.errors import LimitMismatch
from redis_sync_aio.types import BaseLease

from ._session import UNREACHABLE, USAGE, Failure, Session, complain, not_empty, print_error

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
OF_TERMINALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""The signals that a terminal sends to a whole group."""
TO_END = (*OF_TERMINALS, signal.SIGTERM)
"""The signals that are to end a program and its descendants."""
PR_SET_PDEATHSIG = 1
POLL = 0.02


class Child:
    """The program that runs under the lock. `start` it in the main thread."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._has_terminal = _in_foreground(0)
        self._joins = self._has_terminal and not os.isatty(1)
        self._gets_terminal = self._has_terminal and not self._joins
        self._to_end = False  # it was sent a signal that is to end it
        with warnings.catch_warnings():
            # `prepare` takes no lock that another thread, which resolves names, might hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = Popen(
                argv, env=environment, process_group=None if self._joins else 0, preexec_fn=self._preparation()
            )
        self.pid = self._process.pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, as a shell tells it: 128 and the signal if one ended it."""
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), daemon=True).start()

    def forward(self, number: signal.Signals) -> None:
        """Pass on a signal that this process got, unless the program has it already."""
        self._to_end |= number in TO_END
        if not (self._joins and number in OF_TERMINALS):
            self.send(number)

    def go_on(self) -> None:
        """Continue after a stop, with the terminal if this process has it again."""
        if self._gets_terminal and _in_foreground(0):
            _give_terminal(self.pid)
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program, and to its descendants that are still in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if only zombies are left
            (os.kill if self._joins else os.killpg)(self.pid, number)

    async def end(self, number: signal.Signals, grace: float) -> None:
        """End the program and its descendants: first by that signal, after ``grace`` seconds by SIGKILL."""
        self.send(number)
        self.send(signal.SIGCONT)  # a stopped process does not end by SIGTERM
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await asyncio.shield(self.ended)
                while self._has_descendants():
                    await asyncio.sleep(POLL)
        self.send(signal.SIGKILL)
        await self.ended

    async def end_descendants(self, grace: float) -> None:
        """End the rest of its group when it has ended, if a signal was to end both.

        A shell lets its background programs ignore SIGINT and SIGQUIT, so those would go on without the lock. A signal
        of the terminal did not come to this process, but shows in the exit code.
        """
        by_signal = 128 < await self.ended <= 128 + signal.NSIG
        if (self._to_end or by_signal) and self._has_descendants():
            await self.end(signal.SIGTERM, grace)

    def take_terminal_back(self) -> None:
        """Make the group of this process the one that has the terminal, as it was."""
        if self._gets_terminal:
            _give_terminal(os.getpgrp())

    def _has_descendants(self) -> bool:
        if self._joins:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _preparation(self) -> Callable[[], None]:
        """Return the function that runs in the child before the program; everything it needs is loaded here."""
        parent, gets_terminal = os.getpid(), self._gets_terminal
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def prepare() -> None:
            if prctl is not None:  # not outlive a holder that is killed, which cannot renew the lease any more
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os.kill(os.getpid(), signal.SIGKILL)
            if gets_terminal:
                _give_terminal(os.getpid())

        return prepare

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the end, in a thread: only there can a stop be noticed, too."""
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            if self._gets_terminal:
                loop.call_soon_threadsafe(self._stop_too)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(self._set_ended, code if code >= 0 else 128 - code)

    def _set_ended(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def _stop_too(self) -> None:
        self.take_terminal_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued: by SIGCONT, whose handler runs `go_on`.


def _in_foreground(descriptor: int) -> bool:
    """Return whether that is a terminal, and this process's group has it."""
    try:
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def _give_terminal(group: int) -> None:
    with _without_sigttou(), contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)


@contextlib.contextmanager
def _without_sigttou() -> Iterator[None]:
    """Let a process of the background set who has the terminal; it would be stopped for that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- Hold a lock for as long as a program runs, and end the program when the lock is lost ----------------------


LOST = 75
"""EX_TEMPFAIL of sysexits.h."""
CANNOT_EXECUTE, NOT_FOUND = 126, 127
EXITS = {
    1: "the lock was not granted: -n or --timeout (-E sets another code)",
    LOST: "the lock was lost while COMMAND ran",
    CANNOT_EXECUTE: "COMMAND cannot be executed",
    NOT_FOUND: "COMMAND was not found",
}
ENDS = "else the exit code of COMMAND; 128 and the signal if one ended it"


class WhenLost(StrEnum):
    """The choices for a program whose lock is lost."""

    TERM = "term"
    KILL = "kill"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of `run`, checked."""

    # fmt: off
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The lock.", callback=not_empty)]
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", show_default=False,
        help="The program and its arguments.")]
    no_wait: Annotated[bool, typer.Option("--no-wait", "-n", help="Do not wait if the lock is taken.")] = False
    timeout: Annotated[float | None, typer.Option("--timeout", "-w", min=0, metavar="S",
        help="Seconds to wait at most. Without it, and without -n: as long as it takes.")] = None
    conflict_exit_code: Annotated[int, typer.Option("--conflict-exit-code", "-E", min=0, max=255, metavar="CODE",
        help="Exit code if the lock was not granted.")] = 1
    read_side: Annotated[bool, typer.Option("--shared", "-s", help="Use the read side of a read/write lock.")] = False
    write_side: Annotated[bool, typer.Option("--exclusive", "-x",
        help="Use its write side. A lock without -s or -x is another lock.")] = False
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N",
        help="Use a semaphore with N permits instead of a lock.")] = None
    weight: Annotated[int, typer.Option("--weight", min=1, metavar="W", help="Permits of the semaphore to take.")] = 1
    ttl: Annotated[float, typer.Option("--ttl", min=0.1, metavar="S",
        help="Seconds that the lock lasts if this machine dies; it is renewed.")] = 30.0
    on_lost: Annotated[WhenLost, typer.Option("--on-lost",
        help="End COMMAND when the lock is lost: by SIGTERM, by SIGKILL, or not.")] = WhenLost.TERM
    grace: Annotated[float, typer.Option("--grace", min=0, metavar="S",
        help="Seconds between SIGTERM and SIGKILL.")] = 10.0
    # fmt: on

    def __post_init__(self) -> None:
        limit, weight = self.limit, self.weight
        if self.no_wait and self.timeout is not None:
            raise Failure("-n does not wait and --timeout waits: give one of them", USAGE)
        if self.read_side + self.write_side + (limit is not None) > 1:
            raise Failure("--shared, --exclusive and --limit are three kinds of locks: give one of them", USAGE)
        if limit is None and weight != 1:
            raise Failure("--weight needs --limit", USAGE)
        if limit is not None and weight > limit:
            raise Failure(f"--weight {weight} is more than --limit {limit}", USAGE)
        program = self.command[0]
        if shutil.which(program) is None:
            found = os.sep in program and os.path.exists(program)
            why, code = ("cannot be executed", CANNOT_EXECUTE) if found else ("was not found", NOT_FOUND)
            raise Failure(f"{program!r} {why}; nothing was locked", code)


@dataclass(slots=True)
class RunReport:
    """The report that --json prints at the end."""

    name: str
    exit: int = 0
    waited: float = 0.0
    held: float | None = None
    fence: int | None = None
    lost: str | None = None


@dataclass
class ProgramRun:
    """One run: the signals that come, the lease, and the program."""

    session: Session
    plan: Plan
    outcome: RunReport = field(init=False)
    child: Child | None = field(init=False, default=None)
    interrupted: signal.Signals | None = field(init=False, default=None)
    """The signal that came before the program ran."""

    def __post_init__(self) -> None:
        self.outcome = RunReport(self.plan.name)

    async def run(self) -> RunReport:
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
                if found == 0:
                    here = f"{self.plan.name!r} is paused: its limit is 0, not {limit}, until resize() raises it"
                raise Failure(str(error) if found in (None, limit) else here, USAGE) from None
            except ValueError as error:
                raise Failure(str(error), USAGE) from None
            except AcquireTimeout as error:
                command = f"look at the holders: redis-sync-aio show {shlex.quote(self.plan.name)}"
                complain(str(error).replace("look at statistics() for the holders", command))
                return self.plan.conflict_exit_code if error.answered else UNREACHABLE
            finally:
                self.outcome.waited = round(monotonic() - began, 6)
            if lease is None:
                complain(f"{self.plan.name!r} is held by others, or others wait for it (--timeout S waits)")
                return self.plan.conflict_exit_code
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
        elif plan.read_side or plan.write_side:
            both = sync.read_write_lock(plan.name, ttl=plan.ttl, on_lost="event")
            side = both.read() if plan.read_side else both.write()
            acquire, try_acquire = side.acquire, side.try_acquire
        else:
            lock = sync.lock(plan.name, ttl=plan.ttl, on_lost="event")
            acquire, try_acquire = lock.acquire, lock.try_acquire
        waits = not plan.no_wait and plan.timeout != 0
        return await (acquire(timeout=plan.timeout) if waits else try_acquire())

    async def _run_under(self, lease: BaseLease) -> int:
        began = monotonic()
        code = UNREACHABLE
        try:
            try:
                self.child = child = Child(self.plan.command, environment(lease))
            except OSError as error:
                complain(f"cannot run {self.plan.command[0]!r}: {error.strerror}")
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
            if not child.ended.done() and self.plan.on_lost != WhenLost.IGNORE:
                number = signal.SIGTERM if self.plan.on_lost == WhenLost.TERM else signal.SIGKILL
                complain(f"the lock {lease.name!r} was lost: ending {self.plan.command[0]!r} by {number.name}")
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
            return code if self.plan.on_lost == WhenLost.IGNORE else LOST
        except SyncError as error:
            complain(f"the program has ended, but the lock was not released; it ends with its ttl: {error}")
        return code


def environment(lease: BaseLease) -> dict[str, str]:
    """Return the environment of the program."""
    own = {"NAME": lease.name, "FENCE": str(lease.fence), "TOKEN": lease.token}
    return os.environ | {f"REDIS_SYNC_AIO_{key}": value for key, value in own.items()}


async def run(session: Session, plan: Plan) -> int:
    """Run COMMAND while holding a lock, a permit, or a side of a read/write lock.

    COMMAND finds the fence, the name and the token in REDIS_SYNC_AIO_FENCE, REDIS_SYNC_AIO_NAME and
    REDIS_SYNC_AIO_TOKEN. With --json one line of JSON about the run is printed on stderr at the end.
    """
    outcome = await ProgramRun(session, plan).run()
    if session.output.as_json:
        print_error(json.dumps(asdict(outcome)))
    return outcome.exit
