"""A program in a process group of its own: its signals, its terminal, its end.

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
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from subprocess import Popen

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
        """End what is left of its group when it has ended, if a signal was to end both.

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
        """Return what runs in the child before the program; everything it needs is loaded here."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
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
