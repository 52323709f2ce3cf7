"""The lifespan of an ASGI application in tests, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..contrib.asgi import App, Message, Receive, Scope, Send


@asynccontextmanager
async def run_lifespan(app: App) -> AsyncIterator[App]:
    """Run the lifespan of an ASGI application around a body, and yield the application to send requests to.

    Each request finds the state of the lifespan, as with a server. The lifespan runs in a task of its own, so fixtures
    may enter and leave it. The application is shut down at the end of the body, also after an error. A cancellation of
    its start or end cancels the lifespan.

    Args:
        app: The application, such as one of FastAPI, Starlette or Litestar.

    Raises:
        RuntimeError: The application says that its start or its end failed, or it returned before that. If it raised an
            error instead, that one is raised.

    Example:
        ```python
        import httpx
        from fastapi import FastAPI

        from redis_sync_aio.testing import run_lifespan

        async def test_the_front_page(app: FastAPI) -> None:
            async with run_lifespan(app) as running:
                transport = httpx.ASGITransport(running)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                    assert (await http.get("/")).status_code == 200
        ```
    """
    state: dict[str, object] = {}
    asked, said = asyncio.Queue[Message](), asyncio.Queue[Message]()

    async def run() -> None:
        try:
            about: Scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}
            await app(about, asked.get, said.put)
        finally:
            said.put_nowait({"type": "returned"})

    async def tell(event: str) -> None:
        asked.put_nowait({"type": f"lifespan.{event}"})
        answer = await said.get()
        if answer["type"] != f"lifespan.{event}.complete":
            await end()
            why = answer.get("message") or "it returned"
            raise RuntimeError(f"the {event} of the application failed: {why}")

    async def end() -> None:
        lifespan.cancel()
        await asyncio.wait([lifespan])
        if not lifespan.cancelled():
            lifespan.result()

    async def running(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": state.copy()}, receive, send)

    lifespan = asyncio.create_task(run(), name="redis_sync_aio testing runs a lifespan")
    try:
        await tell("startup")
        try:
            yield running
        finally:
            await tell("shutdown")
    finally:
        await end()
