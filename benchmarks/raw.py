"""The limit: the minimum cost of a lock, without any library's safety. Not for use."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self, TypeAlias, cast

import hiredis
from redis.asyncio import Redis

Word: TypeAlias = bytes | int
Command: TypeAlias = Callable[..., Awaitable[Any]]
pack = cast("Callable[[tuple[Word, ...]], bytes]", hiredis.pack_command)

COMPARE_AND_DELETE = (
    b"if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
)
TAKE = b"""
local taken = tonumber(redis.call('get', KEYS[1]) or 0)
if taken < tonumber(ARGV[1]) then return redis.call('incr', KEYS[1]) end
redis.call('rpush', KEYS[2], ARGV[2])
return 0
"""
GIVE = b"""
local first = redis.call('lpop', KEYS[2])
if not first then return redis.call('decr', KEYS[1]) end
return redis.call('publish', string.sub(first, 1, 8), string.sub(first, 9))
"""
_numbers = itertools.count()


class RawLock:
    """SET NX PX, and EVALSHA to compare and delete. While the lock is taken it polls every millisecond."""

    def __init__(self, command: Command, key: str, ttl: float) -> None:
        self._command, self._key, self._ttl_ms = command, key.encode(), int(ttl * 1000)
        self._prefix = os.urandom(8).hex().encode() + b":"
        self._sha = b""

    async def acquire(self) -> bytes:
        """Return the token."""
        if not self._sha:
            self._sha = await self._command(b"SCRIPT", b"LOAD", COMPARE_AND_DELETE)
        token = b"%b%d" % (self._prefix, next(_numbers))
        while not await self._command(b"SET", self._key, token, b"NX", b"PX", self._ttl_ms):
            await asyncio.sleep(0.001)
        return token

    async def release(self, token: bytes) -> None:
        """Release the lock that ``token`` holds."""
        await self._command(b"EVALSHA", self._sha, 1, self._key, token)


class RawConnection(Protocol):
    """One connection that carries the commands of all tasks."""

    def command(self, *words: Word) -> Awaitable[Any]: ...
    async def close(self) -> None: ...


class _OneWriteATurn:
    """Sends the commands of one turn of the loop in one write; matches replies in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._pending: deque[asyncio.Future[Any]] = deque()

    def command(self, *words: Word) -> asyncio.Future[Any]:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(pack(words))
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append(future)
        return future

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        self._write(data)

    def _write(self, data: bytes) -> None:
        raise NotImplementedError

    def _reply(self, reply: Any) -> None:
        future = self._pending.popleft()
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)


class MultiplexedConnection(_OneWriteATurn):
    """redis-py's own Connection, through its public methods, with timeouts turned off."""

    def __init__(self, client: Redis, connection: Any) -> None:
        super().__init__()
        self._client, self._connection = client, connection
        self._writing: asyncio.Task[None] | None = None
        self._reading = self._loop.create_task(self._read())

    @classmethod
    async def open(cls, url: str) -> Self:
        client = Redis.from_url(url, socket_timeout=None)
        connection: Any = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        return cls(client, connection)

    def _write(self, data: bytes) -> None:
        self._writing = self._loop.create_task(self._connection.send_packed_command(data, check_health=False))

    async def _read(self) -> None:
        while True:
            self._reply(await self._connection.read_response())

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._connection.disconnect(nowait=True)
        await self._client.aclose()


class RawProtocol(_OneWriteATurn, asyncio.Protocol):
    """asyncio and hiredis, nothing else. ``pushed`` gets RESP3 pushes, after ``HELLO 3``."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = hiredis.Reader(notEnoughData=NotImplemented)
        self._transport: asyncio.Transport
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.pushed: Callable[[list[Any]], None] = lambda push: None

    @classmethod
    async def open(cls, url: str) -> Self:
        loop = asyncio.get_running_loop()
        scheme, _, address = url.partition("://")
        if scheme == "unix":
            return (await loop.create_unix_connection(cls, address))[1]
        host, _, port = address.partition(":")
        return (await loop.create_connection(cls, host, int(port)))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set_result(None)

    def _write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not NotImplemented:
            push = cast("list[Any]", reply) if isinstance(reply, hiredis.PushNotification) else None
            if push is None or push[0] == b"subscribe":  # in RESP3 the answer to SUBSCRIBE is a push
                self._reply(reply)
            else:
                self.pushed(push)

    async def close(self) -> None:
        self._transport.abort()
        await self._gone


class RawSemaphores:
    """A counter, a list of waiters, and a PUBLISH by each release, over a bare protocol.

    It is fair and keeps the limit as long as no process dies and no message is lost: permits do not expire.
    """

    def __init__(self, protocol: RawProtocol, inbox: bytes, take: bytes, give: bytes) -> None:
        self._protocol, self._inbox, self._take, self._give = protocol, inbox, take, give
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        protocol.pushed = self._pushed

    @classmethod
    async def open(cls, url: str) -> Self:
        protocol, inbox = await RawProtocol.open(url), os.urandom(4).hex().encode()
        await protocol.command(b"HELLO", 3)
        await protocol.command(b"SUBSCRIBE", inbox)
        take, give = [await protocol.command(b"SCRIPT", b"LOAD", script) for script in (TAKE, GIVE)]
        return cls(protocol, inbox, take, give)

    async def acquire(self, key: bytes, limit: int) -> None:
        """Wait for a permit of ``key``."""
        number = b"%d" % next(_numbers)
        granted = self._waiting[number] = asyncio.get_running_loop().create_future()
        words = (b"EVALSHA", self._take, 2, key, key + b":queue", limit, self._inbox + number)
        if await self._protocol.command(*words):
            del self._waiting[number]
        else:
            await granted

    async def release(self, key: bytes) -> None:
        """Hand the permit to the first waiter."""
        await self._protocol.command(b"EVALSHA", self._give, 2, key, key + b":queue")

    def _pushed(self, push: list[Any]) -> None:
        self._waiting.pop(push[2]).set_result(None)

    async def close(self) -> None:
        await self._protocol.close()
