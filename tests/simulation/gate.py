"""Simulation: real clients and a real server, and a gate between them that decides what happens next.

    with Gate(server.unix_socket) as gate:
        gate.run(main)              # main(): creates clients with gate.client(), awaits as usual

The clients' connections are in memory, so nothing but the gate passes anything on, one command or one frame from
the server at a time; commands reach the server through blocking sockets. The time of the event loop and of
`redis_sync_aio` is a number that the gate sets. The gate acts when the loop has nothing left to do, so the
order in which things happen is its choice alone, and nothing ever waits for real time. The jitter of back-offs is
the same in every run, so with the same choices the same happens again.

By itself the gate is calm: all is delivered in turn, and when nothing is in flight the time of the next timer comes.
`choose` replaces that.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self, TypeVar

import hiredis
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio.testing._resp import Frame

from ..support.virtual import PUBLISHING, IdleLoop, Stuck, Wire, virtual_time
from ..support.virtual import Command as Command

T = TypeVar("T")

NO_INTRODUCTION: dict[str, Any] = (
    {"driver_info": None} if importlib.util.find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)
"""Options of a client that does not tell the server which library it is of; redis-py before 7.2 has other ones."""
Move = tuple[int, Callable[[], object]]
"""Something that may happen next, and how likely it is."""


class Pipe(asyncio.Transport):
    """The client's end of a connection, with all that is in flight, and the connection to the server behind it.

    Once lost it stays in the gate's books until it is forgotten: what was sent may still get to the server.
    """

    def __init__(self, gate: Gate, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._gate, self._protocol = gate, protocol
        self._commands = hiredis.Reader()
        self._wire = Wire(gate.path)
        self.up: deque[Command] = deque()
        self.down: deque[bytes] = deque()
        self.lost = False  # for the client
        self.ended = False  # for the server
        self.subscribed = False
        self.watching = False
        self.queued: list[Command] | None = None
        """What the server has queued since MULTI."""
        asyncio.get_running_loop().call_soon(protocol.connection_made, self)

    # -- for the client ------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.lost:
            self._commands.feed(bytes(data))
            while (words := self._commands.gets()) is not False:
                self.up.append(tuple(words))

    def close(self) -> None:
        self.lose(None)

    abort = close

    def is_closing(self) -> bool:
        return self.lost

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # -- for the gate --------------------------------------------------------------------------------------

    def lose(self, error: Exception | None) -> None:
        """Let the client lose it; what it wrote is still in flight."""
        if not self.lost:
            self.lost = True
            self._gate.lost += 1
            self.down.clear()
            asyncio.get_running_loop().call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)

    def cut(self) -> None:
        """Lose it on the way."""
        self.lose(ConnectionResetError("cut"))

    def forget(self) -> None:
        """Let the server notice that it is lost; what is in flight never arrives."""
        self.end()
        self.up.clear()
        self._gate.pipes.remove(self)

    def end(self) -> None:
        """Close it at the server."""
        if not self.ended:
            self.ended = True
            self._wire.close()

    def deliver_up(self) -> None:
        """Let the server have the next command, and take its answer."""
        words = self.up.popleft()
        if self.ended:
            return
        if not self._gate.permits(self, words):
            if not self.lost:
                self.down.append(self._gate.refusal)
            return
        self._gate.delivered += 1
        self._gate.time += self._gate.step
        name = words[0].upper()
        self.subscribed |= name == b"SUBSCRIBE"
        self._follow(name, words)
        self._take(self._wire.ask(words, _is_confirmation if name == b"SUBSCRIBE" else None))
        if name in PUBLISHING and self.queued is None:
            self._gate.collect()

    def _follow(self, name: bytes, words: Command) -> None:
        """Keep the books on WATCH and MULTI."""
        if name in (b"EXEC", b"UNWATCH"):
            self.watching, self.queued = False, None
        elif name == b"WATCH":
            self.watching = True
        elif name == b"MULTI":
            self.queued = []
        elif self.queued is not None:
            self.queued.append(words)

    def deliver_down(self) -> None:
        """Let the client have the next frame."""
        frame = self.down.popleft()
        assert isinstance(self._protocol, asyncio.Protocol)
        if frame:
            self._protocol.data_received(frame)
        else:
            self.lose(None)

    def collect(self) -> None:
        """Take what the server has sent by itself."""
        self._take(self._wire.sent())

    def _take(self, frames: Iterator[Frame]) -> None:
        try:
            for frame in frames:
                if not self.lost:
                    self.down.append(frame.raw)
        except ConnectionError:
            self.end()
            if not self.lost:
                self.down.append(b"")


def _is_confirmation(frame: Frame) -> bool:
    return frame.items[:1] == [b"subscribe"]


class _Connection(Connection):
    """redis-py's connection, with a pipe through the gate instead of a socket."""

    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None

    def __init__(self, *, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self._gate = gate
        gate.connections.append(self)

    def drop(self) -> None:
        """Forget the pipe, with no loop running: no word of it at its end."""
        self._reader = self._writer = None

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._writer = asyncio.StreamWriter(self._gate.open(protocol), protocol, reader, loop)
        self._reader = reader
        await asyncio.sleep(0)


class Gate:
    """See the top of this module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.time = 1000.0
        self.step = 0.001
        """Seconds a command takes, which puts the server's clock behind ours. With 0 it is ahead, as if it were set."""
        self.pipes: list[Pipe] = []
        self.connections: list[_Connection] = []
        self.refuse = False  # new connections
        self.choose: Callable[[float | None], None] = self.calm
        """Lets one thing happen; gets the seconds until the next timer, or None."""
        self.permits: Callable[[Pipe, Command], bool] = lambda _pipe, _words: True
        """Whether a command may reach the server. The one that may not is answered with an error."""
        self.refusal = b"-NOPERM not permitted\r\n"
        self.delivered = self.lost = 0
        self.errors: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._patched = virtual_time(lambda: self.time)
        self._patched.__enter__()
        self._random = random.getstate()
        random.seed(0)  # back-off and jitter
        return self

    def __exit__(self, *_: object) -> None:
        random.setstate(self._random)
        self._patched.__exit__(None, None, None)

    def client(self, **options: Any) -> Redis:
        """Return a client whose connections go through the gate."""
        options = {"retry": Retry(NoBackoff(), 0)} | NO_INTRODUCTION | options
        options = {"socket_timeout": None, "socket_connect_timeout": None} | options
        return Redis.from_pool(ConnectionPool(connection_class=_Connection, gate=self, **options))

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``main()`` to its end in a new event loop. Errors that nobody looks at are raised, too."""
        self.errors = []
        try:
            with asyncio.Runner(loop_factory=lambda: IdleLoop(lambda: self.time, self.idle)) as runner:
                runner.get_loop().set_exception_handler(lambda _, context: self.errors.append(context))
                result = runner.run(main())
        finally:
            self.choose = self.calm
            for pipe in list(self.pipes):
                pipe.lost = True
                pipe.forget()
            for connection in self.connections:
                connection.drop()
        assert not self.errors, self.errors
        return result

    # -- what happens --------------------------------------------------------------------------------------

    def idle(self, timeout: float | None) -> None:
        """Do something: the loop has nothing to do."""
        self.choose(timeout)

    def calm(self, timeout: float | None) -> None:
        """Deliver what is there, or let time pass."""
        for pipe in self.pipes:
            if pipe.up:
                pipe.deliver_up()
                return
            if pipe.down:
                pipe.deliver_down()
                return
        if timeout is None:
            raise Stuck("nothing is in flight and no timer is set")
        self.time += timeout

    def moves(self, faults: bool) -> list[Move]:
        """Return what may happen to the connections, with ``faults`` also that they are lost."""
        found: list[Move] = []
        for pipe in self.pipes:
            if pipe.up:
                found.append((2 if pipe.lost else 40, pipe.deliver_up))
            if pipe.down:
                found.append((40, pipe.deliver_down))
            if pipe.lost:
                found.append((1, pipe.forget))
            elif faults:
                found.append((1, pipe.cut))
        return found

    def open(self, protocol: asyncio.BaseProtocol) -> Pipe:
        if self.refuse:
            raise ConnectionRefusedError("the gate is closed")
        pipe = Pipe(self, protocol)
        self.pipes.append(pipe)
        return pipe

    def collect(self) -> None:
        """Take what the server has sent to those who subscribed."""
        for pipe in self.pipes:
            if pipe.subscribed and not pipe.ended and pipe.queued is None:  # else the PING would be queued
                pipe.collect()
