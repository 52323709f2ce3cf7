"""Run the command line in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..support.programs import COMMAND, PATIENCE, environment


class Terminal:
    """A program in a pseudo-terminal, as its controlling terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = b""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def screen(self) -> str:
        """Everything that was printed so far, with its escape sequences."""
        return self._seen.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without escape sequences."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.screen)

    def shows(self, pattern: str) -> str:
        """Return once what was printed matches; fail after a while."""
        with self._news:
            found = self._news.wait_for(lambda: re.search(pattern, self.screen), PATIENCE)
        assert found, f"no {pattern!r} in {self.screen!r}"
        return self.screen

    def shows_after(self, length: int, pattern: str) -> None:
        """Return once what was printed after so many characters matches; fail after a while."""
        with self._news:
            assert self._news.wait_for(lambda: re.search(pattern, self.screen[length:]), PATIENCE), self.screen

    def types(self, keys: str) -> None:
        """Press keys; "\\x03" is Ctrl-C."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, of which the program hears by SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def end(self) -> int:
        """Wait until the program has ended and return its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def is_sane(self) -> bool:
        """Whether the terminal echoes and takes lines, as it did before."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._master, 65536)
            except OSError:  # EIO: nobody has the other end open
                some = b""
            with self._news:
                self._seen += some
                self._news.notify_all()
            if not some:
                return


@contextmanager
def terminal(*words: str, columns: int = 80, lines: int = 24, **more: str) -> Iterator[Terminal]:
    """Start ``redis-sync-aio WORDS`` in a terminal of that size; it is killed at the end of the block."""
    with program_in_terminal([*COMMAND, *words], environment(**more), columns, lines) as started:
        yield started


@contextmanager
def program_in_terminal(
    argv: list[str], env: Mapping[str, str], columns: int = 80, lines: int = 24
) -> Iterator[Terminal]:
    """Start a program as the leader of a session whose terminal it has."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    # The leader of a session takes the first terminal that it opens.
    take = f'exec <{os.ttyname(slave)} >{os.ttyname(slave)} 2>&1 && exec "$@"'
    process = subprocess.Popen(
        ["/bin/sh", "-c", take, "sh", *argv], stdin=slave, stdout=slave, stderr=slave, env=dict(env),
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    started = Terminal(process, master)
    try:
        yield started
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        started._reader.join(PATIENCE)
        os.close(master)
