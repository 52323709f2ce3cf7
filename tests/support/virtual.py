"""Virtual time: tests that wait, with real clients and a real server, and no second of waiting.

All tests that are coroutines run in a `VirtualLoop`, but for those marked ``real``.

Connections inside the process are in memory. A connection to a server is a blocking socket that is asked one command
at a time. When the loop has nothing to do, the time of its next timer comes. The server follows: its scripts and TIME
tell the loop's time, and its keys lose as much of their ttl as has passed. A command takes a tenth of a millisecond.

What needs real time: TLS, threads and processes with timers of their own, servers that are paused, commands that block.
`simulation` runs on the same loop; there a gate (`gate.py`) decides what happens next.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, cast

import hiredis
import pytest

from redis_sync_aio import _scripts as scripts
from redis_sync_aio.testing._resp import Frame, Splitter

from .executions import clocked
from .inside import cancellation, load, started_servers
from .inside import clock as real_clock

Address: TypeAlias = str | tuple[str, int]
Command: TypeAlias = tuple[bytes, ...]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH = 1_900_000_000
"""Seconds since 1970 when a loop's time is 0."""
COMMAND = 0.0001
"""Seconds that a command takes."""
OFF_MS = 3
"""By so many milliseconds keys may be too old or too young; a key also by a stall right before it is made."""
TALK = 0.002
"""Seconds at most that nodes have to talk to each other, which they do in real time, whenever tasks wait."""
MANY = 100
"""For each so many keys they may be off by one millisecond more: to shift them takes longer."""
PUBLISHING = frozenset({b"EVALSHA", b"EVAL", b"PUBLISH", b"SPUBLISH", b"EXEC"})
"""After these there may be a push for others; after CLIENT KILL the end of their connection."""
SUBSCRIBING = frozenset({b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE"})
PONGS = (b"+PONG\r\n", b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")
SHIFT = """
local now, shifted = redis.call('TIME'), 0
now = now[1] * 1000 + math.floor(now[2] / 1000)
for number, _, expires in redis.call('INFO', 'keyspace'):gmatch('db(%d+):keys=(%d+),expires=(%d+)') do
  if expires ~= '0' then
    redis.call('SELECT', number)
    for _, key in ipairs(redis.call('KEYS', '*')) do
      local ends = redis.pcall('PEXPIRETIME', key)
      shifted = shifted + 1
      if type(ends) ~= 'number' then -- before Redis 7.0
        ends = redis.call('PTTL', key)
        ends = ends < 0 and ends or now + ends
      end
      if ends >= 0 and ends - ARGV[1] <= now then redis.call('DEL', key)
      elseif ends >= 0 then redis.call('PEXPIREAT', key, ends - ARGV[1]) end
    end
  end
end
return shifted"""
"""Take milliseconds from the ttl of each key, and return the number of keys."""


class Stuck(AssertionError):
    """Tasks wait, and nothing will ever happen again."""


# -- The clock -----------------------------------------------------------------------------------------------------


@contextmanager
def virtual_time(clock: Callable[[], float]) -> Iterator[None]:
    """Give every module of the package and of the tests this clock, by the names ``now`` and ``wall_ns``.

    No timer repeats cancellations every 0.1 seconds meanwhile: time passes only while nothing else happens.
    """

    def wall_ns() -> int:
        return int((EPOCH + clock()) * 1e9)

    clocks = {"now": (real_clock.now, clock), "wall_ns": (real_clock.wall_ns, wall_ns)}
    heed, cancellation.HEED_EVERY = cancellation.HEED_EVERY, None
    for name, (real, new) in clocks.items():
        _replace(name, real, new)
    try:
        yield
    finally:
        cancellation.HEED_EVERY = heed
        for name, (real, new) in clocks.items():
            _replace(name, new, real)  # also where a module was imported meanwhile


def _replace(name: str, old: object, new: object) -> None:
    for module in _with_clock(name, len(sys.modules)):
        if getattr(module, name) is old:
            setattr(module, name, new)


@lru_cache(maxsize=2)
def _with_clock(name: str, _imported: int) -> list[ModuleType]:
    """Return our modules that have this name. There are more only when more modules have been imported."""
    ours = [module for path, module in sys.modules.items() if path.startswith(("redis_sync_aio", "tests"))]
    return [module for module in ours if hasattr(module, name)]


# -- The server ----------------------------------------------------------------------------------------------------


class Wire:
    """A blocking connection to a server."""

    def __init__(self, address: Address) -> None:
        self.local = isinstance(address, str)
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(10)
            try:
                self._socket.connect(address)
            except OSError:
                self._socket.close()
                raise
        else:
            self._socket = socket.create_connection(address, 10)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = Splitter()

    def ask_all(self, words: Command) -> bytes:
        """Return all that the server sends up to its answer."""
        return b"".join(frame.raw for frame in self.ask(words))

    def ask(self, words: Command, is_answer: Callable[[Frame], bool] | None = None) -> Iterator[Frame]:
        """Yield the frames that the server sends up to its answer: the first one that is no push, by default."""
        self._socket.sendall(hiredis.pack_command(cast("tuple[Any, ...]", words)))
        answered = False
        while not answered:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError
            for frame in self._frames.feed(data):
                answered |= frame.kind != ">" if is_answer is None else is_answer(frame)
                yield frame

    def sent(self) -> Iterator[Frame]:
        """Yield what the server has sent by itself: all of it comes before the answer to a PING."""
        for frame in self.ask((b"PING",), _is_pong):
            if not _is_pong(frame):
                yield frame

    def arrived(self) -> Iterator[Frame]:
        """Yield what is here already: what the server has written to a unix socket has arrived."""
        while select.select([self._socket], [], [], 0)[0]:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError
            yield from self._frames.feed(data)

    def close(self) -> None:
        self._socket.close()


def _is_pong(frame: Frame) -> bool:
    return frame.raw in PONGS or frame.raw.startswith((b"-NOAUTH", b"-NOPERM"))  # of a user who may not ask


class ServerClock:
    """The time of one server: its keys lose what has passed in virtual time, and get back what has in real time.

    No key expires in between, however long this machine is stalled: Valkey from 8.1 on has a mode in which it deletes
    none by itself, and in which those who say so see all of them. Other servers refuse that.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._keep_keys(b"yes")
        self.see_keys(wire)
        self._real = time.monotonic()
        self._late = 0.0
        self._off_ms = OFF_MS

    def pass_time(self, seconds: float) -> None:
        real = time.monotonic()
        self._late += seconds - (real - self._real)
        self._real = real

    def set(self) -> None:
        """Let the server's keys be as old as they are in virtual time."""
        milliseconds = int(self._late * 1000)
        if abs(milliseconds) >= self._off_ms:
            self._late -= milliseconds / 1000
            with suppress(OSError):  # its end
                shifted = self._wire.ask_all((b"EVAL", SHIFT.encode(), b"0", b"%d" % milliseconds))
                self._off_ms = OFF_MS + (int(shifted[1:]) // MANY if shifted.startswith(b":") else 0)

    def flush(self) -> None:
        """Let the server write all that earlier commands have caused: it does before it reads another one."""
        with suppress(OSError):
            self._wire.ask_all((b"PING",))

    def _keep_keys(self, kept: bytes) -> None:
        with suppress(OSError):
            self._wire.ask_all((b"CONFIG", b"SET", b"import-mode", kept))

    @staticmethod
    def see_keys(wire: Wire) -> None:
        """Let this connection see all keys."""
        with suppress(OSError):  # the server has too many
            wire.ask_all((b"CLIENT", b"IMPORT-SOURCE", b"ON"))

    def close(self) -> None:
        self._keep_keys(b"no")
        self._wire.close()


@cache
def _clocked() -> Mapping[bytes, bytes]:
    """Return the scripts that read the clock, with two more arguments for it, by their SHA1 and by their source."""
    found: dict[bytes, bytes] = {}
    root = Path(scripts.__file__).parent
    for path in root.glob("*/*.lua"):
        if path.parent.name != "include":
            script = load(f"{path.parent.name}/{path.stem}")
            if b"redis.call('TIME')" in script.source:
                found[script.sha] = found[script.source] = clocked(script).encode()
    return found


def in_time(words: Command, now: float) -> Command:
    """Return a command, with a script that takes its time from its arguments in the place of one that asks for it."""
    name, known = words[0].upper(), _clocked()
    if name in (b"EVALSHA", b"EVAL") and words[1] in known:
        source = known[words[1]]
        script = _sha(source) if name == b"EVALSHA" else source
        return name, script, *words[2:], *(b"%d" % part for part in _parts(now))
    if name == b"SCRIPT" and len(words) == 3 and words[1].upper() == b"EXISTS" and words[2] in known:
        return *words[:2], _sha(known[words[2]])
    return words


def _sha(source: bytes) -> bytes:
    return sha1(source).hexdigest().encode()


def _parts(now: float) -> tuple[int, int]:
    return divmod(int((EPOCH + now) * 1e6), 1_000_000)


# -- The network ---------------------------------------------------------------------------------------------------


class Socket(asyncio.Transport):
    """One end of a connection; what it sends arrives in the next turn of the loop."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._loop = loop
        self._protocol = protocol
        self.closing = False
        loop.call_soon(protocol.connection_made, self)

    def is_closing(self) -> bool:
        return self.closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def take(self, data: bytes) -> None:
        """Give the protocol what has arrived."""
        if data and not self.closing:
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)

    def take_eof(self) -> None:
        """Tell the protocol that no more comes."""
        if not self.closing:
            assert isinstance(self._protocol, asyncio.Protocol)
            if not self._protocol.eof_received():
                self.close()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            self.ended()

    def ended(self) -> None:
        """Tell the other end."""

    def abort(self) -> None:
        self.close()


class Pipe(Socket):
    """An end whose other end is in this process, too."""

    peer: Pipe

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closing:
            self._loop.call_soon(self.peer.take, bytes(data))

    def write_eof(self) -> None:
        if not self.closing:
            self._loop.call_soon(self.peer.take_eof)

    def ended(self) -> None:
        self._loop.call_soon(self.peer.take_eof)


class ToServer(Socket):
    """An end whose other end is a server."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.BaseProtocol, address: Address) -> None:
        self._wire, self._clock = loop.connect(address)
        self._address = address
        super().__init__(loop, protocol)
        self._commands = hiredis.Reader()
        self._up: deque[Command] = deque()
        self._due = False
        self._gone = False
        self._subscribed = False
        self._queueing = False
        self.watching = False
        loop.to_servers.add(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closing:
            return
        self._commands.feed(bytes(data))
        while (words := self._commands.gets()) is not False:
            self._up.append(tuple(words))
        if self._up and not self._due:
            self._due = True
            self._loop.call_soon(self._deliver)

    def write_eof(self) -> None:
        self._loop.call_soon(self.close)  # as the server does, after what was written

    def _deliver(self) -> None:
        self._due = False
        answers = []
        while self._up and not self._gone:
            answers.append(self._answer(self._up.popleft()))
        self.take(b"".join(answers))
        if self._gone:
            self.take_eof()

    def _answer(self, words: Command) -> bytes:
        """Let the server have a command; return what it sends."""
        name = words[0].upper()
        self._loop.pass_time(COMMAND)
        if name == b"TIME" and not self._queueing:
            seconds, micros = (b"%d" % part for part in _parts(self._time()))
            return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(seconds), seconds, len(micros), micros)
        if name == b"SCRIPT" and words[1].upper() == b"LOAD" and words[2] in _clocked():
            self._ask((b"SCRIPT", b"LOAD", _clocked()[words[2]]))
        self._loop.set_servers()
        self._follow(name)
        said = self._ask(in_time(words, self._time()), name.lower() if name in SUBSCRIBING else None)
        kills = name == b"CLIENT" and words[1].upper() == b"KILL"
        if (kills or name in PUBLISHING) and not self._queueing:
            self._collect_others(kills)
        return said

    def _collect_others(self, kills: bool) -> None:
        others = [one for one in self._loop.to_servers if one is not self and one.may_get(kills)]
        if any(one.is_beside(self) for one in others):
            self._clock.flush()
        for other in others:
            other.collect(other.is_beside(self))

    def _time(self) -> float:
        """Return the time by the server's clock."""
        return self._loop.time() + self._loop.ahead.get(self._address, 0.0)

    def _follow(self, name: bytes) -> None:
        self._subscribed |= name in SUBSCRIBING
        self._loop.nodes_talk |= name == b"REPLICAOF"
        self._queueing = name == b"MULTI" or (self._queueing and name not in (b"EXEC", b"DISCARD"))
        self.watching = name == b"WATCH" or (self.watching and name not in (b"EXEC", b"DISCARD", b"UNWATCH"))

    def _ask(self, words: Command, confirmed: bytes | None = None) -> bytes:
        """Return what the server sends up to its answer, or up to the first confirmation of a subscription."""
        said = []
        try:
            is_answer = None if confirmed is None else lambda frame: frame.kind == "-" or frame.items[:1] == [confirmed]
            for frame in self._wire.ask(words, is_answer):
                said.append(frame.raw)
        except TimeoutError:
            raise Stuck(f"the server does not answer {words[:2]!r}: mark the test `real`") from None
        except OSError:
            self._gone = True
        return b"".join(said)

    def may_get(self, kills: bool) -> bool:
        """Return whether a command of another connection may send something here; ``kills``: or end this one."""
        return not self._gone and not self._queueing and (self._subscribed or kills)

    def is_beside(self, other: ToServer) -> bool:
        """Return whether both lead to one server by its unix socket."""
        return self._clock is other._clock and self._wire.local

    def collect(self, arrived: bool) -> None:
        """Take what the server has sent by itself, or notice that it has closed this connection.

        ``arrived``: all of it is here. Else the server is asked.
        """
        said = []
        try:
            for frame in self._wire.arrived() if arrived else self._wire.sent():
                said.append(frame.raw)
        except OSError:
            self._gone = True
        self._loop.call_soon(self.take, b"".join(said))
        if self._gone:
            self._loop.call_soon(self.take_eof)

    def ended(self) -> None:
        """Let the server have what was written before the end."""
        while self._up and not self._gone:
            self._answer(self._up.popleft())
        self._gone = True
        self._wire.close()
        self._loop.to_servers.discard(self)


class Listener(asyncio.AbstractServer):
    """A server in this process, such as a proxy."""

    def __init__(self, loop: VirtualLoop, factory: Callable[[], asyncio.BaseProtocol], port: int) -> None:
        self._loop, self._factory, self._port = loop, factory, port
        self._accepted: list[Pipe] = []
        loop.listeners[port] = self

    def accept(self) -> Pipe:
        self._accepted.append(Pipe(self._loop, self._factory()))
        return self._accepted[-1]

    @property
    def sockets(self) -> list[Listener]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def close(self) -> None:
        self._loop.listeners.pop(self._port, None)

    def close_clients(self) -> None:
        for one in self._accepted:
            one.close()

    abort_clients = close_clients

    def is_serving(self) -> bool:
        return self._port in self._loop.listeners

    def get_loop(self) -> VirtualLoop:
        return self._loop

    async def start_serving(self) -> None:
        """Return: it serves from the beginning."""

    async def serve_forever(self) -> None:
        await asyncio.Event().wait()

    async def wait_closed(self) -> None:
        """Return: connections outlive it."""


# -- The loops -----------------------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """Calls ``idle`` in the place of waiting."""

    def __init__(self, idle: Callable[[float | None], None]) -> None:
        super().__init__()
        self._idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._idle(timeout)
        return ready

    def wait(self, timeout: float) -> None:
        """Wait in real time until something is ready."""
        super().select(timeout)


class IdleLoop(asyncio.SelectorEventLoop):
    """An event loop in the time of ``clock()``, which calls ``idle`` in the place of waiting for the next timer."""

    def __init__(self, clock: Callable[[], float], idle: Callable[[float | None], None]) -> None:
        self._clock = clock
        self._waiting = _Selector(idle)
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._clock()


class VirtualLoop(IdleLoop):
    """See the top of this module."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._clocks: dict[bytes, ServerClock] = {}
        self._threads = 0
        self._ports = iter(range(10000, 20000))  # neither the system gives these, nor `EmbeddedServer`
        self.listeners: dict[int, Listener] = {}
        self.to_servers: set[ToServer] = set()
        self.nodes_talk = False
        self.ahead: dict[Address, float] = {}
        """By how many seconds the clock of the server at an address is ahead of the loop's."""
        super().__init__(lambda: self._now, self._idle)
        self._random = random.getstate()
        random.seed(0)  # back-off and jitter
        self._patched = virtual_time(self.time)
        self._patched.__enter__()

    def close(self) -> None:
        if not self.is_closed():
            random.setstate(self._random)
            self._patched.__exit__(None, None, None)
            for one in list(self.to_servers):
                one.close()
            for clock in self._clocks.values():
                clock.close()
        super().close()

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for clock in self._clocks.values():
            clock.pass_time(seconds)

    def set_servers(self) -> None:
        """Let the servers' keys be as old as they are in virtual time, unless WATCH would notice."""
        if not any(one.watching for one in self.to_servers):
            for clock in self._clocks.values():
                clock.set()

    def _idle(self, timeout: float | None) -> None:
        if self._threads:
            self._waiting.wait(0.01)
        elif timeout is None:
            raise Stuck("nothing is in flight and no timer is set")
        else:
            if self.nodes_talk:
                time.sleep(min(timeout, TALK))
            self.pass_time(timeout)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run a function in a thread; no timer fires until it has ended."""
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: object) -> None:
        self._threads -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._threads -= 1

    def connect(self, address: Address) -> tuple[Wire, ServerClock]:
        """Open a connection to a server, whose clock is this loop's from the first one on."""
        address = _nearest(address)
        wire = Wire(address)
        try:
            found = wire.ask_all((b"INFO", b"server"))
        except OSError:  # it has too many clients
            wire.close()
            raise
        if b"_mode:cluster" in found:
            self.nodes_talk |= b"cluster_known_nodes:1\r" not in wire.ask_all((b"CLUSTER", b"INFO"))
        self.nodes_talk |= b"_mode:sentinel" in found
        run_id = found.partition(b"run_id:")[2].partition(b"\r\n")[0] or str(address).encode()  # it wants a password
        if run_id not in self._clocks:
            self._clocks[run_id] = ServerClock(Wire(address))
        ServerClock.see_keys(wire)
        return wire, self._clocks[run_id]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        _no_tls(options)
        await asyncio.sleep(0)
        protocol: asyncio.BaseProtocol = protocol_factory()
        if port not in self.listeners:
            return await self._made(ToServer(self, protocol, (host, port)), protocol)
        here = Pipe(self, protocol)
        here.peer = self.listeners[port].accept()
        here.peer.peer = here
        return await self._made(here, protocol)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        _no_tls(options)
        await asyncio.sleep(0)
        protocol: asyncio.BaseProtocol = protocol_factory()
        return await self._made(ToServer(self, protocol, path), protocol)

    async def _made(self, socket: Socket, protocol: asyncio.BaseProtocol) -> tuple[Socket, asyncio.BaseProtocol]:
        await asyncio.sleep(0)
        return socket, protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        _no_tls(options)
        return Listener(self, protocol_factory, port or next(self._ports))


def _nearest(address: Address) -> Address:
    """Return the unix socket of the server of this process that listens at a TCP address, if it is the only one."""
    found = [server for server in started_servers if (server.host, server.port) == address]
    if len(found) == 1 and os.path.exists(found[0].unix_socket):
        return found[0].unix_socket
    return address


def stall(seconds: float) -> None:
    """Block the running loop, which is a virtual one, for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_time(seconds)


def _no_tls(options: Mapping[str, object]) -> None:
    if options.get("ssl") or options.get("sock"):
        raise NotImplementedError("neither TLS nor sockets in virtual time: mark the test `real`")


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests in virtual time, but for those marked ``real``."""
    if item.get_closest_marker("real") is not None:
        return {"real": asyncio.new_event_loop}
    return {"virtual": VirtualLoop}
