"""For the tests of the tools: what breaks things for other tests does break them, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing._resp import Frame, Splitter, encode
from redis_sync_aio.testing.faults import FaultProxy

A_WHILE = 0.05
"""Long enough for anything that may come to have come."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def upstream(server: EmbeddedServer) -> str:
    return server.unix_socket


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def proxy(upstream: str, no_task_is_left: None) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(upstream) as proxy:
        yield proxy
    assert proxy.live == 0


@pytest.fixture
async def direct(upstream: str, no_task_is_left: None) -> AsyncIterator[Redis]:
    """A client that knows the truth."""
    async with Redis(unix_socket_path=upstream, decode_responses=True) as client:
        await client.flushall()
        yield client


class Wire:
    """A raw connection: commands out, whole frames in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = Splitter()
        self._frames: list[Frame] = []

    def send(self, *args: bytes | str | int) -> None:
        self._writer.write(encode(*args))

    async def receive(self) -> bytes:
        """The next whole frame."""
        while not self._frames:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0).raw

    async def call(self, *args: bytes | str | int) -> bytes:
        self.send(*args)
        return await self.receive()

    async def rest(self) -> bytes:
        """What comes until the connection is closed."""
        frames = b"".join(frame.raw for frame in self._frames)
        return frames + self._splitter.rest() + await self._reader.read()

    async def is_silent(self) -> bool:
        """Nothing comes, and it stays open."""
        try:
            async with asyncio.timeout(A_WHILE):
                await self.receive()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def wires(proxy: FaultProxy) -> AsyncIterator[Callable[[], Any]]:
    """Opens raw connections through the proxy."""
    opened: list[Wire] = []

    async def connect() -> Wire:
        opened.append(Wire(*await asyncio.open_connection(proxy.host, proxy.port)))
        return opened[-1]

    yield connect
    for wire in opened:
        await wire.close()


@pytest.fixture
async def wire(wires: Callable[[], Any]) -> Wire:
    opened: Wire = await wires()
    return opened


@pytest.fixture(params=[2, 3])
async def subscriber(request: pytest.FixtureRequest, wire: Wire) -> Wire:
    """Subscribed to ``news``, in RESP2 or RESP3."""
    await wire.call("HELLO", request.param)
    await wire.call("SUBSCRIBE", "news")
    return wire
