"""The limit on requests in flight: real servers, streams, websockets, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from redis_sync_aio import AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.contrib.asgi import Limit, lifespan_of
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LeaseLost
from redis_sync_aio.testing import lose

from ..support.body import FAST
from ..support.sweep import Outcome, sweep
from .web import LONG, needs_websockets, raw, uvicorn_of, waiters

pytestmark = pytest.mark.real  # servers listen on sockets


@pytest.fixture
def permits(other: Coordinator) -> AsyncSemaphore:
    """The permits of the limit, as another process sees them."""
    return other.semaphore("requests", limit=None)


async def held(permits: AsyncSemaphore, count: int) -> None:
    async def reached() -> bool:
        return (await permits.statistics()).held == count

    await wait_until(reached, FAST, timeout=LONG)


@asynccontextmanager
async def limited(
    endpoint: Callable[[Any], Awaitable[Response | None]], client: Any, **options: Any
) -> AsyncIterator[int]:
    """Serve an application with a limit, and yield the port."""
    routes = [Route("/{rest:path}", endpoint, methods=["GET", "POST"]), WebSocketRoute("/{rest:path}", endpoint)]
    app = Starlette(routes=routes)
    app.add_middleware(Limit, client=client, **options)
    async with uvicorn_of(app) as port:
        yield port


class Doors:
    """An endpoint that counts who is inside, and lets nobody out until it is told to."""

    def __init__(self) -> None:
        self.inside = self.most = self.served = 0
        self.open = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.open.wait()
        finally:
            self.inside -= 1
        self.served += 1
        return PlainTextResponse(await request.body())


def answering(doors: Doors) -> Callable[[Request], Awaitable[Response]]:
    """Starlette takes a coroutine function for an endpoint, and no object that is called as one."""

    async def endpoint(request: Request) -> Response:
        return await doors(request)

    return endpoint


async def test_no_more_than_the_limit_are_in_flight_over_all_processes(
    server: EmbeddedServer, redis: Redis, permits: AsyncSemaphore
) -> None:
    """P1, with two services that know nothing of each other; requests beyond the limit wait and are served later."""
    doors = Doors()
    async with AsyncExitStack() as stack:
        ports = [
            await stack.enter_async_context(
                limited(
                    answering(doors), await stack.enter_async_context(server.client()), limit=3, timeout=LONG, ttl=60
                )
            )
            for _ in range(2)
        ]
        clients = [await stack.enter_async_context(raw(port)) for port in ports * 4]
        for client in clients:
            await client.send("POST", "/", b"a", b"b")
        await waiters(permits, 5)
        await wait_until(lambda: doors.inside == 3, FAST, timeout=LONG)
        for client in clients:
            client.writer.write(b"b")
        doors.open.set()
        for client in clients:
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await client.until(b"ab") == b"ab"
    assert (doors.most, doors.served) == (3, 8)
    await held(permits, 0)


async def test_when_full_the_answer_is_503_or_as_chosen_and_a_full_queue_429(
    redis: Redis, permits: AsyncSemaphore
) -> None:
    """What does not count is served. The coordinator is that of the lifespan."""

    def only(path: str) -> Callable[[Any], bool]:
        return lambda scope: bool(scope["path"] == path)

    app = FastAPI(lifespan=lifespan_of(redis))
    app.add_middleware(Limit, limit=1, timeout=None, max_waiting=1, applies_to=only("/wait"))
    app.add_middleware(Limit, limit=1, status=529, retry_after=3, applies_to=only("/now"))
    app.add_middleware(Limit, limit=1, retry_after=7, applies_to=only("/usual"))
    for path in ("/wait", "/now", "/usual", "/health"):
        app.get(path)(lambda: "well")
    await permits.resize(1)
    async with uvicorn_of(app) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def got(path: str) -> tuple[int, str | None]:
            async with session.get(path) as answer:
                assert answer.status != 503 or await answer.json() == {
                    "detail": "the service is not available: try again"
                }
                return answer.status, answer.headers.get("Retry-After")

        async with permits:
            waiting = asyncio.create_task(got("/wait"))
            await waiters(permits, 1)
            assert [await got(path) for path in ("/wait", "/now", "/usual", "/health")] == [
                (429, "1"),
                (529, "3"),
                (503, "7"),
                (200, None),
            ]
        assert await waiting == (200, None)
        await permits.resize(0)
        assert await got("/usual") == (503, "7")
    await held(permits, 0)


async def test_a_stream_has_its_permit_to_its_end_also_when_the_client_goes(
    redis: Redis, permits: AsyncSemaphore
) -> None:
    go_on = asyncio.Event()

    async def endpoint(request: Request) -> Response:
        async def parts() -> AsyncIterator[str]:
            yield "first"
            await go_on.wait()
            yield "last"

        return StreamingResponse(parts())

    async with limited(endpoint, redis, limit=2) as port, raw(port) as stays:
        await stays.send("GET", "/")
        await stays.until(b"first")
        async with raw(port) as goes:
            await goes.send("GET", "/")
            await goes.until(b"first")
            await held(permits, 2)
        await held(permits, 1)
        go_on.set()
        await stays.until(b"last")
        await held(permits, 0)


@pytest.mark.parametrize("size", [10, 300_000], ids=["a short body", "a body too long to be read ahead"])
async def test_a_client_that_goes_while_it_waits_leaves_the_queue_and_bodies_arrive_whole(
    redis: Redis, permits: AsyncSemaphore, size: int
) -> None:
    doors = Doors()
    doors.open.set()
    await permits.resize(1)
    lease = await permits.acquire()
    async with limited(answering(doors), redis, limit=1, timeout=None) as port, raw(port) as stays:
        async with raw(port) as goes:
            await goes.send("POST", "/", b"short")
            await waiters(permits, 1)
        await waiters(permits, 0)
        await stays.send("POST", "/", b"x" * size)
        await waiters(permits, 1)
        await lease.release()
        head = await stays.until(b"\r\n\r\n")
        assert f"content-length: {size}\r\n" in head.decode()
    assert doors.served == 1
    await held(permits, 0)


async def test_a_client_that_goes_is_no_incident_inside_other_middleware(
    redis: Redis, permits: AsyncSemaphore, caplog: pytest.LogCaptureFixture
) -> None:
    """Starlette's raises when the application that it wraps sends no answer, also if nobody is there to get it."""

    async def unchanged(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    app = Starlette(routes=[Route("/", answering(Doors()), methods=["POST"])])
    app.add_middleware(Limit, client=redis, limit=1, timeout=None)
    app.add_middleware(BaseHTTPMiddleware, dispatch=unchanged)
    await permits.resize(1)
    async with uvicorn_of(app) as port, permits:
        async with raw(port) as goes:
            await goes.send("POST", "/", b"short")
            await waiters(permits, 1)
        await waiters(permits, 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- websockets --------------------------------------------------------------------------------------------


@needs_websockets
async def test_a_websocket_has_its_permit_until_it_is_closed(redis: Redis, permits: AsyncSemaphore) -> None:
    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    async with limited(endpoint, redis, limit=1, timeout=0) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/"
        async with session.ws_connect(url) as websocket:
            await websocket.send_str("hello")
            assert await websocket.receive_str() == "hello"
            assert (await permits.statistics()).held == 1
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(url)
            assert refused.value.status == 503
        await held(permits, 0)
        async with session.ws_connect(url) as websocket:
            await websocket.send_str("again")
            assert await websocket.receive_str() == "again"


@needs_websockets
@pytest.mark.parametrize("words", [[], ["hello"]], ids=["immediately", "after a message"])
async def test_a_websocket_that_loses_its_permit_is_closed_to_be_tried_again(
    server: EmbeddedServer, words: list[str]
) -> None:
    ended = asyncio.Event()

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        for word in words:
            await websocket.send_text(word)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with (
        server.client() as client,
        Coordinator(client) as sync,
        limited(endpoint, sync, limit=1) as port,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/") as websocket,
        asyncio.timeout(LONG),
    ):
        assert [await websocket.receive_str() for _ in words] == words
        await sync.aclose()
        message = await websocket.receive()
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1013)
        await ended.wait()


async def test_a_websocket_that_the_server_cannot_answer_is_closed(sync: Coordinator, permits: AsyncSemaphore) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await permits.resize(1)
    async with permits:
        await Limit(_never, limit=1, client=sync)({"type": "websocket", "path": "/"}, _never, send)  # type: ignore[arg-type]
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1013)]


# -- loss and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in the middle of the answer"])
async def test_a_request_that_loses_its_permit_is_cancelled_and_not_answered_as_if_it_were_whole(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    working = asyncio.Event()

    async def endpoint(request: Request) -> Response:
        async def parts() -> AsyncIterator[str]:
            yield "first"
            working.set()
            await asyncio.Event().wait()

        if not begun:
            await anext(found := parts())
            await anext(found)
        return StreamingResponse(parts())

    async with (
        server.client() as client,
        Coordinator(client) as sync,
        limited(endpoint, sync, limit=1) as port,
        raw(port) as caller,
        asyncio.timeout(LONG),
    ):
        await caller.send("GET", "/")
        await working.wait()
        await sync.aclose()
        if begun:
            assert not (await caller.rest()).endswith(b"0\r\n\r\n"), "the chunks have no end"
        else:
            assert b" 503 " in await caller.until(b"\r\n")
    assert "request_not_served" in {getattr(record, "event", "") for record in caplog.records}


async def test_redis_out_of_reach_is_503_and_says_why_in_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Redis(unix_socket_path="/nowhere/secret.sock") as client,
        Coordinator(client, retry_for=0.01) as sync,
        limited(answering(Doors()), lambda: sync, limit=1) as port,
        raw(port) as caller,
    ):
        await caller.send("GET", "/")
        answer = await caller.until(b"}")
    assert b" 503 " in answer
    assert b"secret" not in answer
    assert "GET /: Unreachable" in caplog.text


async def test_errors_of_the_application_and_of_the_server_pass_as_they_are(
    sync: Coordinator, permits: AsyncSemaphore
) -> None:
    """P7: an inner lock, busy or lost, is not taken for the limit. Nor is an error while it listens for the client."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await sync.lock("inner").acquire(timeout=0)

    async def broken() -> dict[str, object]:
        await waiters(permits, 1)
        raise RuntimeError("broken")

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        async with sync.lock("lost") as lease:
            await lose(lease)
            await _never()

    with pytest.raises(LeaseLost, match="lost"):
        await Limit(losing, limit=1, client=sync)({"type": "http", "path": "/"}, _never, _discard)
    async with sync.lock("inner"):
        with pytest.raises(TimeoutError, match="inner"):
            await Limit(app, limit=1, client=sync)({"type": "http", "path": "/"}, _never, _discard)
    async with permits:
        with pytest.raises(RuntimeError, match="broken"):
            await Limit(app, limit=1, client=sync, timeout=None)({"type": "http", "path": "/"}, broken, _discard)
    await held(permits, 0)


async def _never() -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError


async def _discard(message: object) -> None: ...


async def test_what_is_no_request_passes_and_a_missing_coordinator_is_named() -> None:
    seen = Counter[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen[scope["type"]] += 1

    limit = Limit(app, limit=1)
    await limit({"type": "lifespan"}, _never, _discard)
    assert seen == {"lifespan": 1}
    with pytest.raises(RuntimeError, match=r"use lifespan_of\(redis\), or Limit"):
        await limit({"type": "http", "state": {}}, _never, _discard)
    with pytest.raises(TypeError):
        await Limit(app, limit=1, client=lambda: None)({"type": "http"}, _never, _discard)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, LONG])
async def test_a_request_that_is_cancelled_at_any_await_leaves_nothing(
    sync: Coordinator, permits: AsyncSemaphore, timeout: float
) -> None:
    """P5."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await asyncio.sleep(0)

    async def request() -> None:
        first = [{"type": "http.request", "body": b""}]

        async def receive() -> Any:
            return first.pop() if first else await _never()

        await Limit(app, limit=1, client=sync, timeout=timeout)({"type": "http", "path": "/"}, receive, _discard)

    async def check(_: Outcome[None]) -> None:
        await held(permits, 0)
        await waiters(permits, 0)

    result = await sweep(request, check)
    assert all(count > 1 for count in result.cancellations.values()), result.cancellations
