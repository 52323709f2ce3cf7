"""`run_lifespan`: applications in tests, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.contrib.asgi import App
from redis_sync_aio.contrib.fastapi import Sync, hold_lock, lifespan_of
from redis_sync_aio.testing import run_lifespan

LONG = 60.0


def client_of(running: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(running), base_url="http://test")


@pytest.fixture
async def http(redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    """A fixture begins and ends in tasks of its own."""
    app = FastAPI(lifespan=lifespan_of(redis))

    @app.get("/", dependencies=[hold_lock("order:1", timeout=LONG)])
    async def read(request: Request, sync: Sync) -> int:
        request.state.mark = getattr(request.state, "mark", 0) + 1
        assert sync is request.state.sync
        return int(request.state.mark)

    async with run_lifespan(app) as running, client_of(running) as http:
        yield http


async def test_requests_find_the_state_of_the_lifespan(http: httpx.AsyncClient) -> None:
    """Each has a copy, as with a server."""
    async with asyncio.timeout(LONG):
        answers = await asyncio.gather(*(http.get("/") for _ in range(4)))
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, 1)] * 4


async def test_the_coordinator_is_closed_at_the_end_even_of_a_body_that_fails(redis: Redis) -> None:
    seen: list[Coordinator] = []

    @asynccontextmanager
    async def other(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        async with lifespan_of(redis)(app) as state:
            seen.append(state["sync"])
            yield {**state}

    async def use() -> None:
        async with run_lifespan(FastAPI(lifespan=other)):
            assert seen[0].why_closed is None
            raise KeyError

    with pytest.raises(KeyError):
        await use()
    assert seen[0].why_closed is not None


def failing(at: str) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if at == "start":
            raise LookupError(at)
        yield
        raise LookupError(at)

    return lifespan


@pytest.mark.parametrize("at", ["start", "end"])
async def test_what_the_application_raises_is_raised(at: str) -> None:
    inside = False
    with pytest.raises(LookupError, match=at):
        async with run_lifespan(FastAPI(lifespan=failing(at))):
            inside = True
    assert inside == (at == "end")


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "there is no database"})


async def returns(scope: Any, receive: Any, send: Any) -> None:
    await receive()


async def never_returns(scope: Any, receive: Any, send: Any) -> None:
    while True:
        await send({"type": (await receive())["type"] + ".complete"})


async def test_an_application_that_does_not_start_or_does_not_return_is_no_hang() -> None:
    async with asyncio.timeout(LONG):
        with pytest.raises(RuntimeError, match="startup of the application failed: there is no database"):
            async with run_lifespan(refuses):
                raise AssertionError
        with pytest.raises(RuntimeError, match="startup of the application failed: it returned"):
            async with run_lifespan(returns):
                raise AssertionError
        async with run_lifespan(never_returns):
            pass
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("at", ["startup", "shutdown"])
async def test_a_cancellation_ends_the_lifespan(at: str) -> None:
    stuck = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] != f"lifespan.{at}":
            await send({"type": event["type"] + ".complete"})
        stuck.set()
        await asyncio.Event().wait()

    async def use() -> None:
        async with run_lifespan(app):
            pass

    using = asyncio.create_task(use())
    async with asyncio.timeout(LONG):
        await stuck.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
    assert len(asyncio.all_tasks()) == 1
