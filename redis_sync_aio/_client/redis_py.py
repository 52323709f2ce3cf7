"""Where redis-py's connection ends and ours begins: the only module that touches the insides of redis-py.

redis-py opens, encrypts, authenticates and sets up a connection exactly as the caller's client is configured: URL, TLS,
unix socket, ACL user, credential provider, Sentinel, db. Then its transport gets our protocol, and redis-py's object is
only kept to close it. Private attributes in use: `_reader` and `_writer` of a connection, `_in_use_connections` and
`_available_connections` of a pool, `_buffer` of asyncio's StreamReader, and `_loop` of its StreamWriter. The suite runs
on the oldest version of redis-py that the package admits, and on the newest.

Our connections are not in the books of the client's pool. So they never compete with the caller's commands, and its
limit is never changed. All that the pool does for them is to close them when the caller closes it (`_Disconnect`).
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, ref

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .._core.cancellation import heeded, wait_shielded
from .._core.version import __version__
from .replies import pack_reply, unpack

# -- Connections in a forked child: they belong to the parent, and the child must neither use nor close them ---


def dead_end(transport: asyncio.BaseTransport) -> None:
    """Point the transport's file descriptor at a silent socket, without touching the parent's connection.

    The child shares the parent's selector. It would read the parent's replies if its loop ran once more, as it does
    when a coroutine is left by SystemExit.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        ours, silent = socket.socketpair()
        ours.setblocking(False)
        os.dup2(ours.fileno(), connection.fileno())
        ours.close()
        _silent.append(silent)  # if it were closed, the child would read the end of the stream


_silent: list[socket.socket] = []


@contextmanager
def in_child(give_up: Callable[[], None]) -> Iterator[None]:
    """Call ``give_up`` in a child that is forked inside the block."""
    _open.add(give_up)
    try:
        yield
    finally:
        _open.discard(give_up)


_open: set[Callable[[], None]] = set()


def _give_up() -> None:
    for give_up in _open:
        give_up()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_give_up)


T = TypeVar("T")


def hang_up(transport: asyncio.BaseTransport) -> None:
    """End the connection after its event loop was closed. The file descriptor is closed with the transport."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with suppress(OSError):  # the server had ended it
            connection.shutdown(socket.SHUT_RDWR)


def bare(error: BaseException) -> BaseException:
    """Return the error that prevented a connection: ``error``, or the one that redis-py wrapped into it.

    redis-py wraps an error reply to the handshake over a unix socket into a plain ConnectionError, as if no reply had
    come. It does the same with everything that is raised before there is a connection, except for network failures.
    """
    cause = error.__cause__
    if cause is None or type(error) is not redis.exceptions.ConnectionError:
        return error
    return cause if isinstance(cause, redis.exceptions.RedisError) or error.args[:1] == (cause,) else error


async def pooled(client: Redis, fresh: bool = False) -> Any:
    """Return a connection of the client's pool; raise what redis-py raises, unwrapped by `bare`.

    With ``fresh`` it has just been opened. A connection that was in use when Sentinel named another primary still leads
    to the old one, so it is opened again, too.
    """
    pool: Any = client.connection_pool
    _leave_closed_loops(pool)
    connection = await _from_pool(client)
    primary = getattr(pool, "master_address", None) if getattr(pool, "is_master", False) else None
    outdated = primary is not None and (connection.host, connection.port) != primary
    if (fresh or outdated) and stream(connection) is not None:
        try:
            await connection.disconnect(nowait=True)
            await bared(connection.connect())
        except BaseException:
            await connection.disconnect(nowait=True)
            await _give_back(pool, connection)
            raise
    return connection


_loops: WeakKeyDictionary[Any, ref[asyncio.AbstractEventLoop]] = WeakKeyDictionary()
"""The event loop in which each pool was used most recently."""


def _leave_closed_loops(pool: Any) -> None:
    """Let idle connections whose event loop was closed be opened again; redis-py would use them."""
    loop, before = asyncio.get_running_loop(), _loops.get(pool)
    if before is not None and before() is loop:
        return
    _loops[pool] = ref(loop)
    for connection in getattr(pool, "_available_connections", ()):
        writer = getattr(connection, "_writer", None)
        if _streams(writer) and writer._loop.is_closed():  # type: ignore[attr-defined]
            hang_up(writer.transport)
            connection._reader = connection._writer = None


async def _give_back(pool: Any, connection: Any) -> None:
    """Release a connection. A cancellation cannot interrupt redis-py's bookkeeping; it is raised afterwards."""
    release = asyncio.get_running_loop().create_task(pool.release(connection), name="redis_sync_aio release")
    await wait_shielded(release)


async def _from_pool(client: Redis) -> Any:
    """Return a connection of the pool; close the idle ones after an error that redis-py does not expect.

    After an error that is neither its own nor the network's, such as a credential provider's, redis-py would use a
    connection as it is, although its handshake was interrupted.
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
    """Return the result of ``connecting``; raise what redis-py raises, unwrapped by `bare`."""
    try:
        with heeded():
            return await connecting
    except redis.exceptions.ConnectionError as error:
        failed = bare(error)
    raise failed  # outside the handler: else the wrapper would be the context of the error it wraps


def write(connection: Any, data: bytes) -> None:
    """Write to a connection that redis-py opened, in this turn of the loop.

    Raise redis-py's ConnectionError, and write nothing, when it is known to be closed. redis-py's own method would
    silently reconnect, and on Python < 3.12 it can swallow a cancellation.
    """
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None or reader.at_eof() or (_streams(writer) and writer.is_closing()):
        raise redis.exceptions.ConnectionError("the connection was closed while it was used")
    # A stand-in for a server, such as fakeredis, has no other method.
    writer.write(data) if _streams(writer) else writer.writelines([data])


def _streams(writer: Any) -> TypeGuard[asyncio.StreamWriter]:
    """Return whether ``writer`` writes to a transport of asyncio; fakeredis's does not."""
    return isinstance(writer, asyncio.StreamWriter)


def stream(connection: Any) -> object | None:
    """Return an object that identifies the connection until it is closed; None when it is closed.

    A connection that is opened again is identified by another object.
    """
    return cast("object | None", connection._writer)


ClosedWithPool: TypeAlias = "ConnectionPool | CloseObserver | AdoptedConnection"
"""An object that is closed together with a pool of the caller, by its ``disconnect``."""


class _Disconnect:
    """The ``disconnect`` of a pool that also closes ``others``, which are not in the pool's books.

    It is an attribute of the pool, so it keeps neither the pool nor the others alive.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = ref(pool)
        self._replaced: Any = vars(pool).get("disconnect")  # the caller may have set one, too
        self.others: WeakSet[ClosedWithPool] = WeakSet()

    async def __call__(self, inuse_connections: bool = True) -> None:
        pool = self._pool()
        closing = [] if pool is None else [self._disconnect(pool, inuse_connections)]
        if inuse_connections:
            closing += [it.disconnect() for it in list(self.others)]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _disconnect(self, pool: Any, inuse_connections: bool) -> Awaitable[None]:
        disconnect = self._replaced or partial(type(pool).disconnect, pool)
        closing: Awaitable[None] = disconnect(inuse_connections)
        return closing


def _closed_with(pool: Any) -> WeakSet[ClosedWithPool]:
    """Return the set of what is closed together with ``pool``."""
    disconnect = vars(pool).get("disconnect")
    if not isinstance(disconnect, _Disconnect):
        disconnect = pool.disconnect = _Disconnect(pool)
    return disconnect.others


class CloseObserver:
    """Calls back when the caller closes the client or its pool, even while no connection of ours is open."""

    def __init__(self, client: Redis, closed: Callable[[], None]) -> None:
        self._closed = WeakMethod(closed)  # the pool must not keep its coordinator alive
        self._closed_with_pool = _closed_with(client.connection_pool)
        self._closed_with_pool.add(self)

    async def disconnect(self) -> None:
        """Call back: the pool is being closed."""
        closed = self._closed()
        if closed is not None:
            closed()

    def leave(self) -> None:
        """Stop observing the pool."""
        self._closed_with_pool.discard(self)


async def close_idle(client: Redis) -> None:
    """Close the idle connections of a client's pool."""
    await client.connection_pool.disconnect(inuse_connections=False)


class StandInTransport(asyncio.Transport):
    """The transport of a connection that is no stream of asyncio, such as that of fakeredis.

    Its replies come as objects, one for each command. A task reads them while some are due.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self._connection = connection
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()
        self._loop = asyncio.get_running_loop()
        self._due = 0
        self._reading: asyncio.Task[None] | None = None
        self._closing = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._due += len(unpack(bytes(data)))
        try:
            write(self._connection, bytes(data))
        except redis.exceptions.RedisError as error:
            self._end(error)
        if self._reading is None and not self._closing:
            self._reading = asyncio.Task(self._read(), loop=self._loop, name="redis_sync_aio replies")

    async def _read(self) -> None:
        protocol = cast("asyncio.Protocol", self._protocol)
        try:
            while self._due:
                try:
                    reply = await self._connection.read_response(disable_decoding=True, timeout=math.inf)
                except redis.exceptions.ResponseError as error:
                    reply = error
                protocol.data_received(pack_reply(reply))
                self._due -= 1
        except redis.exceptions.RedisError as error:
            self._end(error)
        finally:
            self._reading = None
            if self._due:  # a defect, or `asyncio.run`, which cancels all tasks at its end
                self._end(None)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            if self._reading is not None:
                self._reading.cancel()
            self._loop.call_soon(self._protocol.connection_lost, error)


class AdoptedConnection:
    """A connection that redis-py has opened and this package drives."""

    def __init__(self, pool: Any, connection: Any) -> None:
        self._connection = connection
        reader, writer = connection._reader, connection._writer
        self.no_stream: str = "" if _streams(writer) else f"{type(connection).__name__} does not use asyncio streams"
        """The reason that it carries no pushes; empty if it is a stream of asyncio."""
        transport = StandInTransport(connection) if self.no_stream else writer.transport
        self.transport: asyncio.Transport = cast("asyncio.Transport", transport)
        self._redis_protocol: asyncio.BaseProtocol = self.transport.get_protocol()
        self.leftover: bytes = b"" if self.no_stream else bytes(reader._buffer)
        self.named: bool = bool(getattr(connection, "client_name", None)) or not _introduces(connection)
        """True if the caller's client has given it a name, or wants it to have none."""
        self.leads_to: tuple[str | None, int | None] = (
            getattr(connection, "host", None),
            getattr(connection, "port", None),
        )
        self.closed_by_client: bool = False
        self.before_closing: Callable[[], Awaitable[None]] | None = None
        """Called when the caller closes the client, while the connection is still open."""
        self._closed_with_pool = _closed_with(pool)
        self._closed_with_pool.add(self)

    async def disconnect(self) -> None:
        """Close the connection: the caller closes the client."""
        try:
            if self.before_closing is not None and not self.transport.is_closing():
                await self.before_closing()
        finally:
            self.closed_by_client = True
            await self._connection.disconnect()
            self.transport.abort()  # a stand-in has not noticed

    def take(self, protocol: asyncio.Protocol) -> None:
        """Let ``protocol`` receive what arrives from now on."""
        self.transport.set_protocol(protocol)

    def leave(self) -> None:
        """Deregister from the pool, so that closing the client does not close this connection."""
        self._closed_with_pool.discard(self)

    def lost(self, error: Exception | None) -> None:
        """Tell redis-py that the transport is closed, so that what waits for that goes on."""
        self.leave()
        if isinstance(self._redis_protocol, asyncio.Protocol):
            self._redis_protocol.connection_lost(error)
        self._connection._reader = self._connection._writer = None


async def probe(client: Redis, response_timeout: float) -> None:
    """Open a connection of ``client`` with one attempt, and close it again; raise as `pooled` does."""
    connection = _new_connection(client.connection_pool, response_timeout)
    try:
        await bared(connection.connect())
    finally:
        await connection.disconnect(nowait=True)


def _new_connection(pool: Any, response_timeout: float) -> Any:
    connection = pool.make_connection()
    connection.retry = Retry(NoBackoff(), 0)  # our backoff decides, with deadlines
    # Each answer of its handshake; opening it has a limit of its own.
    connection.socket_timeout = min(getattr(connection, "socket_timeout", None) or response_timeout, response_timeout)
    _name_this_package(connection)
    return connection


def _name_this_package(connection: Any) -> None:
    """Let CLIENT SETINFO tell the server that this package uses redis-py, unless the caller wants no CLIENT SETINFO."""
    info = getattr(connection, "driver_info", None)
    if info is not None and hasattr(info, "add_upstream_driver"):
        with suppress(ValueError):  # a version that redis-py does not admit
            connection.driver_info = deepcopy(info).add_upstream_driver("redis_sync_aio", __version__)
    elif getattr(connection, "lib_name", None) == "redis-py":  # redis-py before 7.2
        connection.lib_name = f"redis-py(redis_sync_aio_v{__version__})"


def _introduces(connection: Any) -> bool:
    """Return whether ``connection`` tells the server which library it is of."""
    return any(getattr(connection, about, None) is not None for about in ("driver_info", "lib_name"))


def opening(connection: Any) -> AbstractContextManager[None]:
    """Return a context in which ``connection`` may be opened outside all pools: a forked child leaves it alone."""
    return in_child(partial(_leave_to_parent, connection))


def _leave_to_parent(connection: Any) -> None:
    """Give up a half-open connection in a forked child, whose copy of the parent's loop may run once more."""
    connection.redis_connect_func = _is_not_ours  # replaces the handshake, which may be the next step
    if _streams(connection._writer):
        dead_end(connection._writer.transport)


def _is_not_ours(connection: Any) -> None:
    raise redis.exceptions.ConnectionError("this connection was opened by the parent process")


async def open_connection(client: Redis, response_timeout: float) -> AdoptedConnection:
    """Open one more connection of ``client``, outside its pool, with one attempt.

    ``response_timeout``: the seconds that each answer may take meanwhile. Raise as `pooled` does.
    """
    pool: Any = client.connection_pool
    connection = _new_connection(pool, response_timeout)
    try:
        with opening(connection):
            await bared(connection.connect())
        return AdoptedConnection(pool, connection)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise


class ClusterClosing(Generic[T]):
    """The ``aclose`` of a cluster client that first closes what ``owner`` has opened outside the client.

    It is an attribute of the client, which so keeps ``owner``; it does not keep the client alive.
    """

    def __init__(self, client: RedisCluster, owner: T, close: Callable[[T], Awaitable[None]]) -> None:
        self.owner = owner
        self._client = ref(client)
        self._close_owned = close

    def __call__(self) -> Coroutine[Any, Any, None]:
        # redis-py calls aclose(), too, to connect again: after some MOVED, and when the cluster is down. Nothing but
        # the caller tells the two apart.
        caller = sys._getframe(1)
        by_redis_py = caller.f_globals.get("__name__") in (RedisCluster.__module__, "valkey.asyncio.cluster")
        return self._close(by_user=not by_redis_py or caller.f_code.co_name in ("__aexit__", "close"))

    async def _close(self, by_user: bool) -> None:
        try:
            if by_user:
                await self._close_owned(self.owner)
        finally:
            if (client := self._client()) is not None:
                await type(client).aclose(client)


def close_together(pool: Any, other: ClosedWithPool) -> None:
    """Close ``other``, which does not keep it, when the caller closes ``pool`` (of redis-py or of valkey-py)."""
    _closed_with(pool).add(other)


def on_close(client: RedisCluster, owner: T, close: Callable[[T], Awaitable[None]]) -> None:
    """Await ``close(owner)`` when the caller closes ``client``, before its own connections are closed."""
    client.aclose = ClusterClosing(client, owner, close)  # type: ignore[method-assign]  # of this object only


def owner_of(client: RedisCluster) -> object | None:
    """Return the owner that `on_close` got for ``client``, if there is one."""
    closing = vars(client).get("aclose")
    return closing.owner if isinstance(closing, ClusterClosing) else None
