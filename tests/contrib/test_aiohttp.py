"""Locks around handlers of aiohttp: real servers, and clients that wait, stream, and go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, Lease, NotHeld, wait_until
from redis_sync_aio.contrib.aiohttp import REDIS, SYNC, answer_errors, cleanup_ctx_of, hold_lock, hold_permit
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from ..support.sweep import Outcome, sweep
from .web import LONG, aiohttp_of, free, raw, waiters

pytestmark = pytest.mark.real  # servers listen on sockets

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
UNAVAILABLE = {"detail": "the service is not available: try again"}


def app_of(source: Any, **handlers: Handler) -> web.Application:
    """An application that answers errors; each handler is at its name, with a number behind it."""
    app = web.Application(middlewares=[answer_errors(also=[LookupError])])
    app.cleanup_ctx.append(cleanup_ctx_of(source))
    for name, handler in handlers.items():
        app.router.add_route("*", f"/{name}/{{order_id}}", handler)
    return app


def session_of(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(LONG))


@hold_lock("order:{order_id:int}", timeout=0)
async def name_of(request: web.Request, lease: Lease) -> web.Response:
    return web.Response(text=lease.name)


# -- the application ---------------------------------------------------------------------------------------


async def test_the_application_has_a_client_and_its_coordinator_also_below_and_closes_what_it_made(
    server: EmbeddedServer, redis: Redis, sync: Coordinator
) -> None:
    app, below = app_of(server.client), web.Application()
    below.router.add_get("/{order_id}", name_of)
    app.add_subapp("/below", below)
    async with aiohttp_of(app) as port, session_of(port) as session:
        async with session.get("/below/042") as answer:
            assert await answer.text() == "order:42"
        async with sync.lock("order:42"), session.get("/below/42") as answer:
            assert answer.status == 423
        assert app[SYNC].client is app[REDIS]
        assert app[SYNC].why_closed is None
    assert app[SYNC].why_closed is not None

    app = app_of(sync)
    async with aiohttp_of(app):
        assert app[SYNC] is sync
    assert sync.why_closed is None
    with pytest.raises(TypeError):
        cleanup_ctx_of("redis://x")  # type: ignore[arg-type]


async def test_without_the_context_the_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    app = web.Application()
    app.router.add_get("/{order_id}", name_of)
    async with aiohttp_of(app) as port, session_of(port) as session, session.get("/1") as answer:
        assert answer.status == 500
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    assert "use app.cleanup_ctx.append(cleanup_ctx_of(redis))" in str(record.exc_info[1])


async def test_two_holds_of_a_name_in_a_request_are_one_lease(redis: Redis, other: Coordinator) -> None:
    """It ends with the outer one. A handler that holds the name in another task waits, as any other holder.

    A second hold of a lease that has ended is refused.
    """

    async def twice(request: web.Request, lease: Lease) -> web.Response:
        assert (await name_of(request)).text == "order:1"
        lease.check()
        with pytest.raises(AcquireTimeout):
            await asyncio.create_task(name_of(request))
        if request.query.get("end"):
            await lease.release()
            with pytest.raises(NotHeld):
                await name_of(request)
        return web.Response(text=lease.name)

    outer = hold_lock("order:{order_id:int}", timeout=0)
    async with aiohttp_of(app_of(redis, twice=outer(twice))) as port, session_of(port) as session:
        for path in ("/twice/1", "/twice/1?end=1"):
            async with session.get(path) as answer:
                assert await answer.text() == "order:1"
            assert not await other.lock("order:1").locked()


# -- names -------------------------------------------------------------------------------------------------


async def tenant_of(request: web.Request) -> str:
    return request.headers["X-Tenant"]


class Names:
    @hold_lock("method:{order_id}", timeout=0)
    async def method(self, request: web.Request, lease: Lease) -> web.Response:
        return web.Response(text=lease.name)


class View(web.View):
    @hold_lock("view:{order_id}", timeout=0)
    async def get(self, lease: Lease) -> web.Response:
        return web.Response(text=lease.name)


async def test_names_are_made_of_path_query_and_functions_for_functions_methods_and_views(redis: Redis) -> None:
    @hold_lock(
        "t:{tenant}:{kind}:{ident:uuid}:{method!s:.3}",
        timeout=0,
        values={"tenant": tenant_of, "method": lambda request: request.method},
    )
    async def mine(request: web.Request, lease: Lease) -> web.Response:
        return web.Response(text=lease.name)

    app, ident = app_of(redis, name=name_of, method=Names().method), UUID(int=7)
    app.router.add_view("/view/{order_id}", View)
    app.router.add_post("/mine/{ident}", mine)
    async with aiohttp_of(app) as port, session_of(port) as session:

        async def got(path: str, method: str = "GET", tenant: str = "acme") -> tuple[int, str]:
            async with session.request(method, path, headers={"X-Tenant": tenant}) as answer:
                return answer.status, await answer.text()

        assert await got("/name/42") == await got("/name/042") == (200, "order:42")
        assert await got("/name/many") == (400, "order_id must be a whole number")
        assert await got("/method/1") == (200, "method:1")
        assert await got("/view/1") == (200, "view:1")
        assert await got(f"/mine/{ident.hex}?kind=a", "POST") == (200, f"t:acme:a:{ident}:POS")
        assert await got(f"/mine/{ident}", "POST") == (400, "kind is missing")
        assert await got("/mine/7?kind=a", "POST") == (400, "ident must be a UUID")
        long = "a" * 4500  # a name has 8192 bytes at most
        assert await got(f"/mine/{ident}?kind={long}", "POST", long) == (400, "a value cannot be part of a name")


# -- answers -----------------------------------------------------------------------------------------------


async def test_busy_is_423_a_full_queue_429_and_an_inner_lock_503(
    redis: Redis, other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer says nothing of the inside. A group of such errors is 503; one with another error is 500."""

    @hold_lock("order:{order_id}", timeout=None, max_waiting=1)
    async def queued(request: web.Request, lease: Lease) -> web.Response:
        return web.Response()

    @hold_permit("order:{order_id}", limit=1, timeout=0, status=409)
    async def now(request: web.Request, lease: Lease) -> web.Response:
        return web.Response()

    async def inner(request: web.Request) -> web.Response:
        async with asyncio.TaskGroup() as group:
            group.create_task(request.app[SYNC].lock("inner").acquire(timeout=0))
            if request.match_info["order_id"] == "2":
                group.create_task(own(request))
        raise AssertionError

    async def own(request: web.Request) -> web.Response:
        raise {"1": KeyError("secret"), "2": ZeroDivisionError()}[request.match_info["order_id"]]

    lock, permits = other.lock("order:1", ttl=600, auto_renew=False), other.semaphore("order:1", limit=1)
    app = app_of(redis, change=name_of, queued=queued, now=now, inner=inner, own=own)
    async with aiohttp_of(app) as port, session_of(port) as session, other.lock("inner"):

        async def got(path: str) -> tuple[int, int, str]:
            async with session.post(path) as answer:
                return answer.status, int(answer.headers.get("Retry-After", 0)), await answer.text()

        async with lock as holder, permits:
            waiting = asyncio.create_task(got("/queued/1"))
            await waiters(lock, 1)
            status, after, text = await got("/change/1")
            assert (status, 500 < after <= 600) == (423, True)
            assert "order:1" not in text
            assert holder.token not in text
            assert [(await got(path))[0] for path in ("/queued/1", "/now/1", "/change/2")] == [429, 409, 200]
        assert (await waiting)[0] == 200
        assert [await got(path) for path in ("/inner/1", "/own/1")] == [(503, 1, json.dumps(UNAVAILABLE))] * 2
        assert (await got("/inner/2"))[0] == 500
    told = [record for record in caplog.records if getattr(record, "event", "") == "request_not_served"]
    assert [record.__dict__["kind"] for record in told] == ["AcquireTimeout", "KeyError"]


async def test_an_answer_that_has_begun_is_cut_off_when_the_lease_is_lost(redis: Redis) -> None:
    """No second answer is written into the first."""
    streaming = asyncio.Event()

    @hold_lock("order:{order_id}", timeout=0)
    async def stream(request: web.Request, lease: Lease) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        streaming.set()
        await asyncio.Event().wait()
        return response

    app = app_of(redis, stream=stream)
    async with aiohttp_of(app) as port, raw(port) as caller, asyncio.timeout(LONG):
        await caller.send("GET", "/stream/1")
        await streaming.wait()
        await app[SYNC].aclose()
        received = await caller.rest()
    assert received.count(b"HTTP/1.1") == 1
    assert received.endswith(b"first\r\n"), "the chunks have no end"


# -- clients that go away ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler_cancellation", "leave_when_gone"), [(False, True), (True, False), (True, True)], ids=str
)
async def test_a_client_that_goes_away_leaves_the_queue_and_is_not_served(
    redis: Redis, other: Coordinator, handler_cancellation: bool, leave_when_gone: bool
) -> None:
    served: list[str] = []

    @hold_lock("order:{order_id}", timeout=None, leave_when_gone=leave_when_gone)
    async def change(request: web.Request, lease: Lease) -> web.Response:
        served.append(await request.text())
        return web.Response()

    app, lock = app_of(redis, change=change), other.lock("order:1")
    async with aiohttp_of(app, handler_cancellation=handler_cancellation) as port, lock, raw(port) as stays:
        async with raw(port) as goes:
            await goes.send("POST", "/change/1", b"gone")
            await waiters(lock, 1)
            await stays.send("POST", "/change/1", b"a body that ", b"arrives late")
            stays.writer.write(b"arrives late")
            await waiters(lock, 2)
        await waiters(lock, 1)
        await lock.release()
        assert (await stays.until(b"\r\n")).startswith(b"HTTP/1.1 200")
    assert served == ["a body that arrives late"]
    await free(lock)


@pytest.mark.parametrize("handler_cancellation", [False, True])
async def test_a_client_that_goes_away_while_it_is_sent_to_holds_nothing(
    redis: Redis, other: Coordinator, handler_cancellation: bool
) -> None:
    """Without handler_cancellation the handler goes on, until it writes and finds that nobody is there."""

    @hold_lock("order:{order_id}", timeout=0)
    async def stream(request: web.Request, lease: Lease) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"part")
            await asyncio.sleep(0)

    lock = other.lock("order:1")
    async with aiohttp_of(app_of(redis, stream=stream), handler_cancellation=handler_cancellation) as port:
        async with raw(port) as goes:
            await goes.send("GET", "/stream/1")
            await goes.until(b"part")
            await wait_until(lock.locked, FAST, timeout=LONG)
        await free(lock)


@pytest.mark.parametrize("leave_when_gone", [False, True])
async def test_a_handler_that_is_cancelled_at_any_await_leaves_nothing(
    sync: Coordinator, other: Coordinator, leave_when_gone: bool
) -> None:
    """P5."""

    @hold_lock("order:{order_id}", timeout=None, leave_when_gone=leave_when_gone)
    async def change(request: web.Request, lease: Lease) -> web.Response:
        await asyncio.sleep(0)
        return web.Response()

    app, lock = web.Application(), other.lock("order:1")
    app[SYNC] = sync

    async def check(_: Outcome[web.Response]) -> None:
        await free(lock)

    def request() -> web.Request:
        here = Mock(is_closing=lambda: False)
        return make_mocked_request("POST", "/1", match_info={"order_id": "1"}, app=app, transport=here)

    result = await sweep(lambda: change(request()), check)
    assert all(count > 1 for count in result.cancellations.values()), result.cancellations
