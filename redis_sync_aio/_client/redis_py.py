"""Where redis-py's connection ends and ours begins. Nothing else in this package touches its insides.

redis-py opens, encrypts, authenticates and sets up a connection exactly as the caller's client is
configured (URL, TLS, unix socket, ACL user, credential provider, Sentinel, db). Then the transport gets our
protocol, and redis-py's object is only kept to close it. The attributes used are `_reader`, `_writer` of a
connection, `_in_use_connections` and `_available_connections` of a pool, and `_buffer` of asyncio's StreamReader; the
suite runs on the oldest version of redis-py that we admit and on the newest.

Our connections stand beside the client's pool, not in its books: the caller's commands never compete with them, and
its limit is never changed. All that the pool does for them is to close them when the caller closes it (`_Disconnect`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeGuard, TypeVar, cast
from weakref import WeakMethod, WeakSet, ref

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .._core.cancellation import heeded, wait_shielded
from .resp import Reply, Words

T = TypeVar("T")


class NotAdoptable(Exception):
    """The client's connections are not asyncio streams that could be taken over."""


def dead_end(transport: asyncio.BaseTransport) -> None:
    """In a forked child: let the transport's descriptor lead nowhere, without touching the parent's connection.

    The child shares the parent's selector and would read the parent's replies, should its loop run once more (as
    it does when a coroutine is left by SystemExit). So the descriptor is made another, silent socket.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        ours, silent = socket.socketpair()
        ours.setblocking(False)
        os.dup2(ours.fileno(), connection.fileno())
        ours.close()
        _silent.append(silent)  # if it were closed, the child would see the end of the stream


def hang_up(transport: asyncio.BaseTransport) -> None:
    """End the connection without its event loop, which is closed. The descriptor goes with the transport."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with suppress(OSError):  # the server has ended it before
            connection.shutdown(socket.SHUT_RDWR)


_silent: list[socket.socket] = []


def bare(error: BaseException) -> BaseException:
    """Return what came instead of a connection, as it was: ``error``, or what redis-py put into it.

    What the server answers to the handshake over a unix socket it makes a plain ConnectionError, as if none had come.
    So it does with whatever is raised before there is a connection, but for failures of the network.
    """
    cause = error.__cause__
    if cause is None or type(error) is not redis.exceptions.ConnectionError:
        return error
    return cause if isinstance(cause, redis.exceptions.RedisError) or error.args[:1] == (cause,) else error


async def pooled(client: Redis) -> Any:
    """Return a connection of the client's pool; raise what redis-py raises, but `bare`.

    One that was in use when Sentinel named another primary leads to the old one still, so it is opened again.
    """
    pool: Any = client.connection_pool
    connection = await _from_pool(client)
    primary = getattr(pool, "master_address", None) if getattr(pool, "is_master", False) else None
    if primary is not None and stream(connection) is not None and (connection.host, connection.port) != primary:
        try:
            await connection.disconnect(nowait=True)
            await bared(connection.connect())
        except BaseException:
            await connection.disconnect(nowait=True)
            await _give_back(pool, connection)
            raise
    return connection


async def _give_back(pool: Any, connection: Any) -> None:
    """Release a connection; a cancellation does not tear redis-py's books, and is raised afterwards."""
    release = asyncio.get_running_loop().create_task(pool.release(connection), name="redis_sync_aio release")
    await wait_shielded(release)


async def _from_pool(client: Redis) -> Any:
    """Return a connection of the pool. One whose opening failed half-way is closed: redis-py would use it as it is.

    So it would after an error that is neither its own nor the network's, such as a credential provider's.
    """
    pool: Any = client.connection_pool
    try:
        return await bared(pool.get_connection())
    except (redis.exceptions.RedisError, OSError):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if not isinstance(error, asyncio.CancelledError) or task is None or not task.cancelling():
            await close_idle(client)
        raise


async def bared(connecting: Awaitable[T]) -> T:
    """Return a connection, or what became of connecting; raise what redis-py raises, but `bare`."""
    try:
        with heeded():
            return await connecting
    except redis.exceptions.ConnectionError as error:
        failed = bare(error)
    raise failed  # not inside: the wrapping would be the context of what it wraps


async def send_once(client: Redis, words: Words) -> Reply:
    """Run one command on a pooled connection, once.

    `execute_command` would repeat it up to 10 times without a word, and whoever sends must know (P4). A time-out may
    come at any await, and again (`cancel_repeatedly`): it does not tear redis-py's books.
    """
    pool: Any = client.connection_pool
    connection: Any = await pooled(client)
    answer: Reply = None
    try:
        with heeded():
            await connection.send_command(*words)
            answer = await connection.read_response(disable_decoding=True)
    except redis.exceptions.ResponseError as error:
        answer = error  # raised below: if it were while we give back, it would be the context of a time-out there
    finally:
        await _give_back(pool, connection)
    if isinstance(answer, redis.exceptions.ResponseError):
        raise answer
    return answer


def write(connection: Any, data: bytes) -> None:
    """Write to a connection that redis-py opened, in this turn of the loop.

    Raises redis-py's ConnectionError, and writes nothing, when it is known to be closed. redis-py's own way to send
    would open it again without a word; and on Python < 3.12 it can swallow a cancellation.
    """
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None or reader.at_eof() or (_streams(writer) and writer.is_closing()):
        raise redis.exceptions.ConnectionError("the connection was closed while it was used")
    # Of a stand-in for a server, such as fakeredis, no other method is known.
    writer.write(data) if _streams(writer) else writer.writelines([data])


def _streams(writer: Any) -> TypeGuard[asyncio.StreamWriter]:
    """Return whether it writes to a transport of asyncio; that of fakeredis does not."""
    return isinstance(writer, asyncio.StreamWriter)


def stream(connection: Any) -> object | None:
    """Return an object that stands for the connection while it is open; None when it is closed.

    When it is opened again it is another object.
    """
    return cast("object | None", connection._writer)


def dead_end_pool(client: Redis) -> None:
    """The same for all connections of a client's pool."""
    pool: Any = client.connection_pool
    for connection in (*getattr(pool, "_available_connections", ()), *getattr(pool, "_in_use_connections", ())):
        writer = getattr(connection, "_writer", None)
        if _streams(writer):
            dead_end(writer.transport)


class _Beside(Protocol):
    """What wants to know that the caller closes a pool."""

    async def disconnect(self) -> None: ...


class _Disconnect:
    """The ``disconnect`` of a pool that also closes what stands beside that pool.

    It is an attribute of the pool, so it must not keep the pool alive; nor what stands beside it.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = ref(pool)
        self._before: Any = vars(pool).get("disconnect")  # the caller may have replaced it, too
        self.beside: WeakSet[_Beside] = WeakSet()

    async def __call__(self, inuse_connections: bool = True) -> None:
        pool = self._pool()
        closing = [] if pool is None else [self._disconnect(pool, inuse_connections)]
        if inuse_connections:
            closing += [it.disconnect() for it in list(self.beside)]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _disconnect(self, pool: Any, inuse_connections: bool) -> Awaitable[None]:
        disconnect = self._before or partial(type(pool).disconnect, pool)
        closing: Awaitable[None] = disconnect(inuse_connections)
        return closing


def _beside(pool: Any) -> WeakSet[_Beside]:
    """Return what is closed with ``pool``."""
    disconnect = vars(pool).get("disconnect")
    if not isinstance(disconnect, _Disconnect):
        disconnect = pool.disconnect = _Disconnect(pool)
    return disconnect.beside


class CloseObserver:
    """Learns that the caller closed the client or its pool, also while no connection of ours is open."""

    def __init__(self, client: Redis, closed: Callable[[], None]) -> None:
        self._closed = WeakMethod(closed)  # the pool must not keep its coordinator alive
        self._beside = _beside(client.connection_pool)
        self._beside.add(self)

    async def disconnect(self) -> None:
        """Tell of it."""
        closed = self._closed()
        if closed is not None:
            closed()

    def leave(self) -> None:
        """Learn nothing any more."""
        self._beside.discard(self)


async def close_idle(client: Redis) -> None:
    """Close the connections of a pool that are not in use: those opened since the caller closed it."""
    await client.connection_pool.disconnect(inuse_connections=False)


class AdoptedConnection:
    """A connection that redis-py opened and we drive."""

    def __init__(self, pool: Any, connection: Any) -> None:
        self._connection = connection
        reader, writer = connection._reader, connection._writer
        if not _streams(writer):
            raise NotAdoptable(f"{type(connection).__name__} does not use asyncio streams")
        self.transport = cast("asyncio.Transport", writer.transport)
        self._redis_protocol: asyncio.BaseProtocol = self.transport.get_protocol()
        self.leftover = bytes(reader._buffer)
        self.leads_to = getattr(connection, "host", None), getattr(connection, "port", None)
        self.closed_by_client = False
        self.before_closing: Callable[[], Awaitable[None]] | None = None
        """What is to be done when the client closes it, while it is still open."""
        self._beside = _beside(pool)
        self._beside.add(self)

    async def disconnect(self) -> None:
        """Close it, as the caller closes the client."""
        try:
            if self.before_closing is not None and not self.transport.is_closing():
                await self.before_closing()
        finally:
            self.closed_by_client = True
            await self._connection.disconnect()

    def take(self, protocol: asyncio.Protocol) -> None:
        """Let ``protocol`` receive what arrives from now on."""
        self.transport.set_protocol(protocol)

    def leave(self) -> None:
        """It leads nowhere any more: closing the client must not close it."""
        self._beside.discard(self)

    def lost(self, error: Exception | None) -> None:
        """Tell redis-py that its transport is gone: whoever waits for it to be closed goes on."""
        self.leave()
        if isinstance(self._redis_protocol, asyncio.Protocol):
            self._redis_protocol.connection_lost(error)
        self._connection._reader = self._connection._writer = None


async def probe(client: Redis) -> None:
    """Open a connection of ``client`` with one attempt, and close it again; raise as `pooled`."""
    connection = _new_connection(client.connection_pool)
    try:
        await bared(connection.connect())
    finally:
        await connection.disconnect(nowait=True)


def _new_connection(pool: Any) -> Any:
    connection = pool.make_connection()
    connection.retry = Retry(NoBackoff(), 0)  # our own back-off decides, with deadlines
    return connection


@contextmanager
def opening(connection: Any) -> Iterator[None]:
    """While ``connection`` is opened by us, beside all pools: a child that is forked meanwhile leaves it alone."""
    _opening.add(connection)
    try:
        yield
    finally:
        _opening.discard(connection)


_opening: set[Any] = set()


def _leave_to_the_parent() -> None:
    """In a forked child: say nothing on half open connections. Its copy of the parent's loop may run once more."""
    for connection in _opening:
        connection.redis_connect_func = _is_not_ours  # in the place of the handshake, which may be the next step
        if _streams(connection._writer):
            dead_end(connection._writer.transport)


def _is_not_ours(connection: Any) -> None:
    raise redis.exceptions.ConnectionError("this connection was opened by the parent process")


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_the_parent)


async def open_connection(client: Redis) -> AdoptedConnection:
    """Open one more connection of ``client``, beside its pool, with one attempt.

    Raises as `pooled`, and NotAdoptable.
    """
    pool: Any = client.connection_pool
    connection = _new_connection(pool)
    try:
        with opening(connection):
            await bared(connection.connect())
        return AdoptedConnection(pool, connection)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
