"""Requests that are cancelled after their work was done, while the server has yet to hear of the release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from fastapi import FastAPI

from redis_sync_aio import Coordinator, Lease, wait_until
from redis_sync_aio.contrib import aiohttp, fastapi
from redis_sync_aio.contrib.asgi import Limit
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.body import FAST
from .web import LONG

Work = Callable[[], None]
Lasting = Annotated[Lease, fastapi.hold_permit("requests", limit=1, timeout=0, ttl=600)]


async def _discard(_: Any) -> None: ...


async def _request() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def _scope(**more: Any) -> Any:
    head = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
    return head | {"http_version": "1.1", "scheme": "http"} | more


async def by_fastapi(sync: Coordinator, work: Work) -> None:
    app = FastAPI()

    @app.post("/")
    async def endpoint(lease: Lasting) -> None:
        work()

    await app(_scope(state={"sync": sync}, app=app), _request, _discard)


async def by_aiohttp(sync: Coordinator, work: Work) -> None:
    @aiohttp.hold_permit("requests", limit=1, timeout=0, ttl=600)
    async def handler(request: web.Request, lease: Lease) -> web.Response:
        work()
        return web.Response()

    app = web.Application()
    app[aiohttp.SYNC] = sync
    await handler(make_mocked_request("POST", "/", app=app))


async def by_limit(sync: Coordinator, work: Work) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        work()

    await Limit(app, limit=1, client=sync, ttl=600)(_scope(), _request, _discard)


@pytest.mark.parametrize("way", [by_fastapi, by_aiohttp, by_limit])
async def test_a_request_that_is_cancelled_while_its_lease_is_released_releases_it_and_worked_once(
    server: EmbeddedServer, other: Coordinator, way: Callable[[Coordinator, Work], Awaitable[None]]
) -> None:
    """The release goes on in the background: the permit is free long before its lease would end."""
    done, permits = list[str](), other.semaphore("requests", limit=1)
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, exit_timeout=LONG) as sync:

        def work() -> None:
            done.append("done")
            releases.append(proxy.on("EVALSHA", Action.HOLD))  # nothing is sent before the release

        releases: list[Any] = []
        async with sync.semaphore("requests", limit=1):
            pass  # from now on the server knows the scripts
        request = asyncio.ensure_future(way(sync, work))
        async with asyncio.timeout(LONG):
            await wait_until(lambda: bool(releases), FAST)
            await releases[0].fired.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert (await permits.statistics()).held == 1
            releases[0].release.set()
            async with permits:
                pass
    assert done == ["done"]
