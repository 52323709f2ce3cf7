"""Connections of the caller's pool: checked out, waited for when there are too few, and those that lead to a primary.

WATCH and EXEC need the same connection. None of redis-py's methods that repeat a command is used, and the others are
used like this:

- A cancellation never interrupts redis-py while it connects or does its bookkeeping: both run in tasks of their own.
  (redis-py gives a connection whose handshake was cancelled back to the pool, with a reply unread.)
- redis-py silently reconnects when it finds its connection closed. After a WATCH, the transaction would then watch
  nothing. So a connection that was closed is not used again: commands are written to its transport directly. redis-py
  reads the replies under a timeout of ours, which also avoids the code that swallows cancellations on Python < 3.12.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis

from .._core.cancellation import leaving, undo_in, wait_shielded
from .._core.display import shown
from ..errors import TransactionMisuse
from ..errors._misuse import Misuse
from . import replies as resp
from .redis_py import close_idle, pooled, stream, write
from .replies import Reply
from .settings import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from .cluster import Cluster, Shard

# -- The tasks that wait for a connection of an exhausted pool, where redis-py raises an error immediately -----
#
# The tasks of one event loop wait in order. The first of them tries again when this package gives a connection back,
# and every `LOOK` seconds, since the caller's own commands use the pool, too.


T = TypeVar("T")

LOOK = 0.05
"""Seconds between two looks at an exhausted pool."""


class _Queue:
    """The tasks of one event loop that wait for one pool."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.freed = asyncio.Event()
        self.tasks = 0


_queues: dict[tuple[int, int], _Queue] = {}
"""By the ids of pool and event loop, which the waiting tasks keep alive."""


def _key(pool: object) -> tuple[int, int]:
    return id(pool), id(asyncio.get_running_loop())


def connection_freed(pool: object) -> None:
    """Wake the first task that waits for ``pool``."""
    if (queue := _queues.get(_key(pool))) is not None:
        queue.freed.set()


async def in_turn(pool: object, connect: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return the result of ``connect()``, which is called again for ``seconds`` while ``pool`` is exhausted.

    Raise what it raises. On cancellation the next task has its turn.
    """
    key = _key(pool)
    if key not in _queues:  # else other tasks came first
        try:
            return await connect()
        except redis.exceptions.ConnectionError as error:
            if not _is_exhausted(error) or seconds <= 0:
                raise
    queue = _queues.setdefault(key, _Queue())
    queue.tasks += 1
    timer = asyncio.timeout(seconds)
    try:
        async with timer, queue.turn:
            while True:
                queue.freed.clear()
                try:
                    return await connect()
                except redis.exceptions.ConnectionError as error:
                    if not _is_exhausted(error):
                        raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await queue.freed.wait()
    except TimeoutError:
        if not timer.expired():
            raise  # by `connect`
    finally:
        queue.tasks -= 1
        if not queue.tasks:
            del _queues[key]
    raise redis.exceptions.ConnectionError(
        f"no connection of the pool was free for {seconds:.1f} seconds: raise max_connections of the client"
    )


def _is_exhausted(error: redis.exceptions.ConnectionError) -> bool:
    """Return True if all connections of the pool are in use.

    It is a MaxConnectionsError since redis-py 7.2 only.
    """
    return str(error) == "Too many connections"


Encodables: TypeAlias = Sequence[Any]
"""A command as redis-py takes it."""

Packed: TypeAlias = bytes
"""A command as it is sent."""

OUT_OF_REACH = (redis.exceptions.RedisError, OSError, TimeoutError)
"""Errors of redis-py that mean that no reply came. Error replies of the server are returned, not raised."""


class CheckedOut:
    """A connection that one task uses alone.

    Invariants: ``in_step`` is False from before a write until all its replies were read; ``watching`` is True from
    before a WATCH is written until EXEC or UNWATCH was answered. Only a connection that is in step and watches nothing
    goes back to the pool open.
    """

    def __init__(self, client: Redis, connection: Any, response_timeout: float | None = None) -> None:
        self._client = client
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        limit = connection.socket_timeout if response_timeout is None else response_timeout
        self._response_timeout: float | None = limit  # None: no limit, as for the client's own commands
        self.in_step: bool = True
        self.watching: bool = False
        self.written: bool = False
        """True if any part of the latest exchange may have reached the server."""

    @property
    def address(self) -> str:
        """The address that the connection leads to."""
        path = getattr(self._connection, "path", None)
        return f"unix:{path}" if path else f"{self._connection.host}:{self._connection.port}"

    async def exchange(self, commands: Sequence[Packed], raw: Container[int] = ()) -> list[Reply]:
        """Send the commands in one write and return the replies, error replies of the server among them.

        ``raw`` has the numbers of the replies that are not decoded. Raise OUT_OF_REACH. On cancellation the connection
        is out of step.
        """
        self.written = False
        if not self.in_step:
            raise redis.exceptions.ConnectionError("an earlier reply on this connection was not read")
        write(self._connection, b"".join(commands))
        self.in_step, self.written = False, True
        async with asyncio.timeout(self._response_timeout):
            replies = [await self._read(number in raw) for number in range(len(commands))]
        self.in_step = True
        return replies

    async def _read(self, raw: bool) -> Reply:
        try:
            # `exchange` has one timeout for all replies.
            return await self._connection.read_response(disable_decoding=raw, timeout=math.inf)
        except redis.exceptions.ResponseError as error:
            return error

    def decoded(self, reply: Reply) -> Reply:
        """Return a raw reply as the client would return it: with text for bytes if it decodes replies."""
        encoder: Any = self._connection.encoder
        return _decoded(reply, encoder.decode) if encoder.decode_responses else reply

    async def as_from_client(self, command: Encodables, options: dict[str, Any], reply: Reply) -> Any:
        """Return the reply as the client would return it: passed through its response callbacks."""
        options = {key: value for key, value in options.items() if key not in ("keys", NEVER_DECODE, EMPTY_RESPONSE)}
        callback: Any = self._client.response_callbacks.get(command[0])
        if callback is None:
            return reply
        result = callback(reply, **options)
        return await result if asyncio.iscoroutine(result) else result

    @property
    def executes(self) -> bool:
        """True if this connection has executed MULTI and EXEC before, so its user is allowed to use them."""
        return stream(self._connection) in _proven

    def check_executes(self, multi: Reply, executed: Reply) -> None:
        """Take the replies to an empty MULTI and EXEC, which were sent to find out whether they are allowed."""
        writer = stream(self._connection)
        if isinstance(multi, redis.exceptions.ResponseError) or writer is None:  # None: closed since
            return
        if not isinstance(executed, redis.exceptions.ResponseError):
            _proven.add(writer)
        elif not isinstance(executed, redis.exceptions.ExecAbortError):
            self.in_step = False  # the MULTI is still open

    async def give_back(self, *, drop: bool = False) -> None:
        """Give the connection back to the pool; close it when its state is not certain, or with ``drop``.

        This takes at most one round trip (UNWATCH). A cancellation does not interrupt it, and is raised afterwards. A
        coroutine that is being closed must not wait: it continues in the background.
        """
        if isinstance(leaving(), GeneratorExit) or asyncio._get_running_loop() is not self._loop:
            undo_in(self._loop, partial(_start_giving_back, self, drop))
        else:
            await wait_shielded(_start_giving_back(self, drop))

    async def _give_back(self, drop: bool) -> None:
        try:
            if self.watching and self.in_step and not drop:
                await self._unwatch()
        finally:
            if self.watching or not self.in_step:
                await self._connection.disconnect(nowait=True)
            await self._client.connection_pool.release(self._connection)
            connection_freed(self._client.connection_pool)

    async def _unwatch(self) -> None:
        try:
            async with asyncio.timeout(DEFAULT_TIMEOUT):  # also for a client without timeouts
                (answer,) = await self.exchange([UNWATCH])
        except OUT_OF_REACH:
            return  # it still watches, so it is closed
        self.watching = isinstance(answer, redis.exceptions.ResponseError)


def _decoded(reply: Reply, decode: Callable[[bytes], Any]) -> Reply:
    if isinstance(reply, bytes):
        return decode(reply)
    if isinstance(reply, (list, set)):
        return type(reply)(_decoded(it, decode) for it in reply)
    if isinstance(reply, dict):
        return {_decoded(key, decode): _decoded(value, decode) for key, value in reply.items()}
    return reply


_proven: WeakSet[Any] = WeakSet()
"""Streams of connections that have executed MULTI and EXEC."""

# Options by which redis-py's commands control `parse_response`.
NEVER_DECODE = "NEVER_DECODE"
EMPTY_RESPONSE = "EMPTY_RESPONSE"

Pack: TypeAlias = Callable[[Encodables], Packed]


def name_words(command: object) -> list[bytes]:
    """Return the words of a command's name as they are sent: redis-py's "OBJECT ENCODING" is two words.

    Raise TransactionMisuse for a name that is neither text nor bytes.
    """
    if isinstance(command, str):
        command = command.encode()
    if not isinstance(command, (bytes, bytearray, memoryview)):
        raise TransactionMisuse.of(Misuse.BAD_NAME, shown(command))
    return bytes(command).split()


def packer(client: Redis) -> Pack:
    """Return a function that encodes and packs commands as the client does.

    It raises redis-py's DataError for an argument that is neither text, bytes nor a number.
    """
    untyped: Any = client
    encode = untyped.get_encoder().encode

    def pack(words: Encodables) -> Packed:
        first, *rest = words
        name = name_words(first)
        arguments = [encode(word) for word in rest]
        return resp.pack((*name, *(bytes(it) if isinstance(it, (bytearray, memoryview)) else it for it in arguments)))

    return pack


MULTI, EXEC, UNWATCH = (resp.pack((word,)) for word in (b"MULTI", b"EXEC", b"UNWATCH"))


async def checkout(client: Redis, response_timeout: float | None = None, *, fresh: bool = False) -> CheckedOut:
    """Return a connection of the client's pool, on which an exchange takes at most ``response_timeout`` seconds.

    None means as long as the client waits for a reply, which may be without a limit. With ``fresh`` the connection has
    just been opened. Raise OUT_OF_REACH. When the await is cancelled or closed, a connection that is still being opened
    goes back to the pool by itself.
    """
    connecting = _start(pooled(client, fresh), "connect")
    try:
        await asyncio.wait([connecting])
    except BaseException:  # also GeneratorExit, in whatever thread
        opened = partial(_give_back_opened, client)
        undo_in(connecting.get_loop(), partial(connecting.add_done_callback, opened))
        raise
    return CheckedOut(client, connecting.result(), response_timeout)


def _give_back_opened(client: Redis, connecting: asyncio.Task[Any]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        _start_giving_back(CheckedOut(client, connecting.result()), drop=False)


def _start_giving_back(connection: CheckedOut, drop: bool) -> asyncio.Task[None]:
    return _start(connection._give_back(drop), "release")


_tasks: set[asyncio.Task[Any]] = set()
"""Strong references to tasks; the event loop has only weak ones."""


def _start(work: Any, name: str) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work, name=f"redis_sync_aio {name}")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


# -- Connections of redis-py that lead to the present primary of a shard, and pools of them --------------------


class NodeAddress(NamedTuple):
    """The address at which a node listens."""

    host: str
    port: int


class _Following:
    """Makes a connection class of redis-py lead to the primary of a shard.

    Without a shard it leads to one node, whatever its role is.
    """

    host: str
    port: int
    shard: Shard | None

    def __init__(self, *, shard: Shard | None, **options: Any) -> None:
        super().__init__(**options)
        self.shard = shard

    async def connect(self) -> None:
        above: Any = super()
        shard = self.shard
        if shard is not None:
            if above.is_connected and (self.host, self.port) != shard.address:
                await above.disconnect(nowait=True)  # to a node that was the primary before
            if not above.is_connected:
                await self._connect_to_primary(shard)
                return
        await above.connect()

    async def _connect_to_primary(self, shard: Shard) -> None:
        above: Any = super()
        self.host, self.port = await shard.locate()
        async with asyncio.timeout(None) as limit:
            shard.connecting[limit] = asyncio.get_running_loop()
            try:
                await above.connect()
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
                shard.unreachable(NodeAddress(self.host, self.port))
                raise
            finally:
                del shard.connecting[limit]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        above: Any = super()
        try:
            return await above.read_response(*args, **options)
        except redis.exceptions.MovedError as error:
            answer: redis.exceptions.AskError = error
        except redis.exceptions.AskError as error:
            answer = error
        except redis.exceptions.ClusterDownError:
            if self.shard is not None:
                self.shard.down(NodeAddress(self.host, self.port))
            raise
        # Outside the handler: else the reply would be its context, and taken for an earlier attempt.
        if self.shard is None:
            raise answer
        raise self.shard.redirection(answer)


@functools.cache
def following(kind: type[Any]) -> type[Any]:
    """Return the class of connections that follow a primary, and are like ``kind`` in all else."""
    return type(f"Following{kind.__name__}", (_Following, kind), {})


class SlotPool(ConnectionPool):
    """Takes each connection from the pool of the shard that has the slot at that moment."""

    def __init__(self, cluster: Cluster, slot: int, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._cluster = cluster
        self.slot = slot

    @property
    def shard(self) -> Shard:
        """The shard that has the slot, as far as is known."""
        return self._cluster.shard_at(self.slot)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        shard = await self._cluster.owner(self.slot)
        return await _pool(shard).get_connection()

    async def release(self, connection: Any) -> None:
        await _pool(connection.shard).release(connection)
        if connection.shard.gone:
            await close_idle(connection.shard.client)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the idle connections of the shard. Those in use may be for other slots."""
        await _pool(self._cluster.shard_at(self.slot)).disconnect(inuse_connections=False)

    def make_connection(self) -> Any:
        return _pool(self._cluster.shard_at(self.slot)).make_connection()


def _pool(shard: Shard) -> Any:
    return shard.client.connection_pool
