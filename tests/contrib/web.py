"""Web servers inside the test's process, and clients that speak to them over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from aiohttp import web

from redis_sync_aio import AsyncLock, AsyncSemaphore, wait_until

from ..support.body import FAST
from ..support.views import holder_of

LONG = 60.0
"""Seconds that only end a hang."""

WEBSOCKETS = importlib.util.find_spec("wsproto") is not None
needs_websockets = pytest.mark.skipif(not WEBSOCKETS, reason="wsproto is not installed: uvicorn has no websockets")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to pytest."""
        yield


@asynccontextmanager
async def uvicorn_of(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve an ASGI application, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ws = "wsproto" if WEBSOCKETS else "none"
        config = uvicorn.Config(app, log_config=None, access_log=False, http="h11", ws=ws, **options)
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            await wait_until(lambda: server.started or serving.done(), FAST, timeout=LONG)
            if serving.done():
                await serving  # which says why
                raise AssertionError("uvicorn did not start")
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


@dataclass
class RawClient:
    """One connection, which may be closed at any moment, and the bytes that came over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, method: str, path: str, body: bytes = b"", *more: bytes) -> None:
        """Send a request. ``more``: the rest of the body, which the caller sends later."""
        length = sum(map(len, (body, *more)))
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def until(self, text: bytes) -> bytes:
        """Return what is received up to ``text``."""
        async with asyncio.timeout(LONG):
            return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """Return what is received until the server closes the connection."""
        async with asyncio.timeout(LONG):
            return await self.reader.read()

    async def go(self) -> None:
        """Disconnect."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[RawClient]:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        await client.go()


async def waiters(of: AsyncLock | AsyncSemaphore, count: int) -> None:
    """Wait until so many requests wait at the server."""

    async def reached() -> bool:
        return (await of.statistics()).waiting == count

    await wait_until(reached, FAST, timeout=LONG)


async def free(lock: AsyncLock) -> None:
    """Wait until nobody holds the lock and nobody waits for it."""

    async def reached() -> bool:
        found = await lock.statistics()
        return holder_of(found) is None and not found.waiting

    await wait_until(reached, FAST, timeout=LONG)


@asynccontextmanager
async def aiohttp_of(app: web.Application, *, handler_cancellation: bool = False) -> AsyncIterator[int]:
    """Serve an application of aiohttp, and yield its port."""
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=LONG)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [(_, port)] = runner.addresses
        yield port
    finally:
        await runner.cleanup()
