"""Locks as dependencies of FastAPI: real servers, and clients that wait, stream, and go away."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Router

from redis_sync_aio import Coordinator, Lease, wait_until
from redis_sync_aio.contrib.asgi import Limit
from redis_sync_aio.contrib.fastapi import Sync, answer_errors, hold_lock, hold_permit, lifespan_of
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from ..support.sweep import Outcome, sweep
from .web import LONG, free, raw, uvicorn_of, waiters

pytestmark = pytest.mark.real  # servers listen on sockets

OrderLease = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=None, leave_when_gone=True)]
NowOrNever = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=0)]
Streamed = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=0, scope="request")]
Permit = Annotated[Lease, hold_permit("export:{tenant}", limit=2, timeout=0)]


class User:
    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


async def current_user(x_tenant: Annotated[str, Header()]) -> User:
    return User(x_tenant)


Mine = Annotated[
    Lease, hold_lock("t:{user.tenant}:{kind}:{ident:uuid}", timeout=0, values={"user": Depends(current_user)})
]


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG) as client:
        yield client


@pytest.fixture
def make_app(server: EmbeddedServer, redis: Redis) -> Callable[..., FastAPI]:
    """Make an application with a client of its own on the shared server, which is empty."""

    def make(**options: Any) -> FastAPI:
        app = FastAPI(lifespan=lifespan_of(server.client), **options)
        answer_errors(app, also=[LookupError])
        return app

    return make


# -- the state ---------------------------------------------------------------------------------------------


async def test_the_lifespan_gives_requests_a_client_and_its_coordinator_and_closes_what_it_made(
    server: EmbeddedServer, redis: Redis
) -> None:
    """It goes with other lifespans, which are entered later and left earlier; parts of the state are added up."""
    seen: list[Coordinator] = []
    order: list[str] = []

    @asynccontextmanager
    async def other(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        order.append("entered")
        yield {"pool": "ours"}
        order.append(f"left, closed: {[sync.why_closed for sync in seen]}")

    app = FastAPI(lifespan=lifespan_of(server.client, other))

    @app.get("/")
    async def read(request: Request, sync: Sync) -> str:
        assert request.state.sync is sync
        assert request.state.redis is sync.client
        seen.append(sync)
        async with sync.lock("x"):
            pass
        return str(request.state.pool)

    for _ in range(2):  # an application may be started again
        async with uvicorn_of(app) as port, client_of(port) as client:
            assert (await client.get("/")).json() == "ours"
    assert len({id(sync) for sync in seen}) == 2
    assert [sync.why_closed is None for sync in seen] == [False, False]
    assert order[:2] == ["entered", "left, closed: [None]"]


async def test_a_client_or_coordinator_that_was_given_is_left_to_its_owner(sync: Coordinator, redis: Redis) -> None:
    async with lifespan_of(redis)(FastAPI()) as state:
        assert state["redis"] is redis
        assert state["sync"] is not sync
    assert state["sync"].why_closed is not None
    assert await redis.ping()
    async with lifespan_of(sync)(FastAPI()) as state:
        assert state["sync"] is sync
    assert sync.why_closed is None
    async with lifespan_of(lambda: Coordinator(redis))(FastAPI()) as state:
        assert state["sync"] is not sync
    assert state["sync"].why_closed is not None


async def test_without_the_lifespan_the_error_says_so() -> None:
    app = FastAPI()

    @app.get("/{order_id}")
    async def read(lease: NowOrNever) -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        with pytest.raises(RuntimeError, match=r"FastAPI\(lifespan=lifespan_of\(redis\)\)"):
            await client.get("/1")


# -- names -------------------------------------------------------------------------------------------------


async def test_names_are_made_of_path_query_and_other_dependencies(make_app: Callable[..., FastAPI]) -> None:
    app, ident = make_app(), UUID(int=7)

    @app.get("/orders/{order_id}")
    async def order(lease: NowOrNever) -> str:
        return lease.name

    @app.get("/mine/{ident}")
    async def mine(lease: Mine) -> str:
        return lease.name

    async with uvicorn_of(app) as port, client_of(port) as client:
        assert (await client.get("/orders/42")).json() == (await client.get("/orders/042")).json() == "order:42"
        assert (await client.get("/orders/many")).status_code == 422
        answer = await client.get(f"/mine/{ident.hex}?kind=a", headers={"X-Tenant": "acme"})
        assert answer.json() == f"t:acme:a:{ident}"
        refused = await client.get(f"/mine/{ident}?kind={'a' * 9000}", headers={"X-Tenant": "acme"})
    assert refused.status_code == 422
    assert [error["loc"] for error in refused.json()["detail"]] == [["query", "kind"], ["path", "ident"]]


async def test_a_local_name_in_a_module_with_text_annotations_is_refused_at_the_start(server: EmbeddedServer) -> None:
    """FastAPI would silently take such a lease for a parameter of the query."""
    app = FastAPI(lifespan=lifespan_of(server.client))
    LocalLease = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=0)]

    @app.get("/{order_id}")
    async def read(lease: LocalLease) -> None: ...  # pyright: ignore[reportInvalidTypeForm]

    with pytest.raises(TypeError, match="parameter 'lease' whose annotation, 'LocalLease', names nothing"):
        async with app.router.lifespan_context(app):
            raise AssertionError


# -- answers -----------------------------------------------------------------------------------------------


async def test_busy_is_423_or_as_chosen_and_a_full_queue_429_and_they_say_nothing_of_the_inside(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app, permits = make_app(), other.semaphore("export:1", limit=1)
    lock = other.lock("order:1", ttl=600.5, auto_renew=False)
    queued = hold_lock("order:{order_id:int}", timeout=None, max_waiting=1, status=409)
    app.post("/orders/{order_id}", dependencies=[queued])(lambda: None)
    app.post("/exports/{tenant}", dependencies=[hold_permit("export:{tenant}", limit=1, timeout=None, max_waiting=1)])(
        lambda: None
    )
    app.post("/now/{order_id}", dependencies=[hold_lock("order:{order_id:int}", timeout=0, status=409)])(lambda: None)
    app.post("/usual/{order_id}", dependencies=[hold_lock("order:{order_id:int}", timeout=0)])(lambda: None)
    paths, described = ["/orders/1", "/exports/1"], app.openapi()["paths"]
    assert set(described["/orders/{order_id}"]["post"]["responses"]) == {"200", "422", "409", "429", "503"}
    assert set(described["/exports/{tenant}"]["post"]["responses"]) == {"200", "422", "423", "429", "503"}
    assert set(described["/now/{order_id}"]["post"]["responses"]) == {"200", "422", "409", "503"}
    async with uvicorn_of(app) as port, client_of(port) as client, asyncio.timeout(LONG):
        async with lock as holder, permits:
            waiting = [asyncio.create_task(client.post(path)) for path in paths]
            await waiters(lock, 1)
            await waiters(permits, 1)
            full = [await client.post(path) for path in paths]
            before = holder.remaining()
            busy, usual = await client.post("/now/1"), await client.post("/usual/1")
            after = holder.remaining()
            assert (await client.post("/usual/2")).status_code == 200
        assert [(await it).status_code for it in waiting] == [200, 200]
    said = (429, {"detail": "too many requests wait for this: try again later"})
    assert [(it.status_code, it.json()) for it in full] == [said] * 2
    assert (busy.status_code, usual.status_code) == (409, 423)
    for answer in (full[0], busy, usual):
        assert math.ceil(after) <= int(answer.headers["Retry-After"]) <= math.ceil(before) + 1
        assert "order:1" not in answer.text
        assert holder.token not in answer.text


async def test_errors_of_locks_inside_and_others_of_choice_are_503_and_stand_in_the_log(
    make_app: Callable[..., FastAPI], other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A timeout of an inner lock is not taken for that of the endpoint, and a loss is no success.

    So is a group of such errors, as a TaskGroup raises it. A bug among them is not hidden.
    """
    app = make_app()

    @app.post("/inner/{order_id}")
    async def inner(lease: NowOrNever, sync: Sync) -> None:
        await sync.lock("inner").acquire(timeout=0)

    @app.post("/lost/{order_id}")
    async def lost(lease: NowOrNever) -> None:
        await other.lock(lease.name).force_release()
        await lease.extend(30)

    @app.post("/own")
    async def own() -> None:
        raise KeyError("secret")

    async def fail() -> None:
        raise ZeroDivisionError

    @app.post("/group")
    async def both(sync: Sync, with_a_bug: bool = False) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sync.lock("inner").acquire(timeout=0))
            if with_a_bug:
                group.create_task(fail())

    async with uvicorn_of(app) as port, client_of(port) as client, other.lock("inner"):
        answers = [await client.post(path) for path in ("/inner/1", "/lost/1", "/own", "/group")]
        assert (await client.post("/group?with_a_bug=true")).status_code == 500
    assert [(it.status_code, it.headers["Retry-After"]) for it in answers] == [(503, "1")] * 4
    assert {it.text for it in answers} == {'{"detail":"the service is not available: try again"}'}
    told = [record for record in caplog.records if getattr(record, "event", "") == "request_not_served"]
    assert [record.__dict__["kind"] for record in told] == ["AcquireTimeout", "LeaseLost", "KeyError", "AcquireTimeout"]
    assert "'inner'" in told[3].message


@pytest.mark.parametrize("kind", [FastAPI, Starlette, Router])
@pytest.mark.parametrize("served_alone", [False, True], ids=["new", "served alone before"])
async def test_mounted_applications_answer_as_the_one_that_they_are_mounted_in(
    make_app: Callable[..., FastAPI], other: Coordinator, kind: type, served_alone: bool
) -> None:
    """At any depth, and in middleware. Their own handlers, and those of the application, are left alone."""

    async def busy(request: Request) -> Response:
        await request.state.sync.lock("inner").acquire(timeout=0)
        raise AssertionError

    async def own(request: Request, error: Exception) -> Response:
        return Response(status_code=418)

    handlers: dict[Any, Any] = {LookupError: own, ExceptionGroup: own}
    app, below, wrapped = make_app(exception_handlers=handlers), FastAPI(exception_handlers={LookupError: own}), kind()

    @app.get("/group")
    async def group() -> None:
        raise ExceptionGroup("all of them", [ZeroDivisionError()])

    @below.post("/orders/{order_id}")
    async def change(lease: NowOrNever) -> None: ...

    @below.get("/own")
    async def fail() -> None:
        raise KeyError

    wrapped.add_route("/busy", busy)
    below.mount("/wrapped", Limit(wrapped, limit=100))
    app.mount("/below", below)
    app.mount("/itself", app)
    if served_alone:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(below), base_url="http://x") as client:
            assert (await client.get("/own")).status_code == 418
    async with uvicorn_of(app) as port, client_of(port) as client, other.lock("order:1"), other.lock("inner"):
        assert (await client.post("/below/orders/1")).status_code == 423
        assert (await client.post("/below/orders/2")).status_code == 200
        assert (await client.get("/below/own")).status_code == 418
        assert (await client.get("/group")).status_code == 418
        answer = await client.get("/below/wrapped/busy")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert set(below.openapi()["paths"]["/orders/{order_id}"]["post"]["responses"]) == {"200", "422", "423", "503"}


async def test_the_answers_are_described_for_routes_that_hold_something(make_app: Callable[..., FastAPI]) -> None:
    app, router = make_app(), APIRouter()

    @router.put("/orders/{order_id}", responses={503: {"description": "our own"}})
    async def change(lease: NowOrNever) -> None: ...

    @router.get("/orders")
    async def read() -> None: ...

    @router.websocket("/orders/{order_id}")
    async def talk(websocket: WebSocket, lease: NowOrNever) -> None: ...

    app.include_router(router, prefix="/v1")
    app.include_router(APIRouter(dependencies=[hold_permit("x", limit=1, timeout=0)]))
    for _ in range(2):
        paths = app.openapi()["paths"]
        assert set(paths["/v1/orders/{order_id}"]["put"]["responses"]) == {"200", "422", "423", "503"}
        assert paths["/v1/orders/{order_id}"]["put"]["responses"]["503"]["description"] == "our own"
        assert "Retry-After" in paths["/v1/orders/{order_id}"]["put"]["responses"]["423"]["headers"]
        assert set(paths["/v1/orders"]["get"]["responses"]) == {"200"}


# -- holding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["short", "long"])
async def test_two_holds_of_a_name_in_a_request_are_one_lease_which_ends_with_the_last_of_them(
    make_app: Callable[..., FastAPI], other: Coordinator, first: str
) -> None:
    """The second one does not wait for the first. One ends before the response, the other one after it."""
    app, lock, permits = make_app(), other.lock("order:1"), other.semaphore("export", limit=None)
    short, long = (
        hold_lock("order:{order_id:int}", timeout=0, ttl=9, scope=scope) for scope in ("function", "request")
    )
    for_router, for_endpoint = (short, long) if first == "short" else (long, short)
    router = APIRouter(dependencies=[for_router, hold_permit("export", limit=1, timeout=0)])

    @router.get("/{order_id}", dependencies=[for_endpoint, hold_permit("export", limit=1, timeout=0)])
    async def read() -> StreamingResponse:
        async def rest() -> AsyncIterator[str]:
            yield f"held: {await lock.locked()}, permits: {(await permits.statistics()).held}"

        return StreamingResponse(rest())

    @router.post("/{order_id}", dependencies=[for_endpoint])
    async def lose() -> None:
        await lock.force_release()
        await asyncio.Event().wait()  # the loss cancels it

    app.include_router(router)
    async with uvicorn_of(app) as port, client_of(port) as client, asyncio.timeout(LONG):
        for _ in range(2):
            assert (await client.get("/1")).text == "held: True, permits: 0"
            await free(lock)
        assert (await client.post("/1")).status_code == 503


# -- dependencies that end later -----------------------------------------------------------------------------


async def session_of() -> AsyncIterator[str]:
    """As a dependency that commits after its yield."""
    yield "session"


def timed() -> Iterator[None]:
    yield


class Timed:
    def __call__(self) -> Iterator[None]:
        yield


HELD = hold_lock("order:{order_id:int}", timeout=None)
UNTIL_SENT = hold_lock("order:{order_id:int}", timeout=None, scope="request")
LATE, EARLY = Depends(session_of), Depends(session_of, scope="function")
INSTANCE, PARTIAL = Timed(), functools.partial(timed)
ENDS_EARLY: list[tuple[list[Any], str | None]] = [
    ([HELD, LATE], "session_of"),
    ([EARLY, HELD], "session_of"),
    ([LATE, UNTIL_SENT], "session_of"),
    ([HELD, EARLY], None),
    ([UNTIL_SENT, LATE], None),
    ([UNTIL_SENT, Depends(INSTANCE), HELD], None),
    ([HELD, Depends(INSTANCE, scope="function"), Depends(current_user)], None),
    ([Depends(Timed), Depends(PARTIAL), HELD], repr(PARTIAL)),
    ([Depends(INSTANCE, scope="function"), HELD, Depends(INSTANCE, scope="function")], repr(INSTANCE)),
    ([Depends(INSTANCE)], None),
]
"""Dependencies of an endpoint, in their order, and the one that ends after the lease."""


@pytest.mark.parametrize(("dependencies", "named"), ENDS_EARLY, ids=map(str, range(len(ENDS_EARLY))))
async def test_a_lease_that_ends_before_what_writes_is_named_at_the_start(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture, dependencies: list[Any], named: str | None
) -> None:
    """Holds of one name end with the last of them."""
    app = FastAPI(lifespan=lifespan_of(server.client))
    app.get("/{order_id}", dependencies=dependencies)(lambda: None)
    async with app.router.lifespan_context(app):
        assert [dependency for *_, dependency in early_ends(caplog)] == ([named] if named else [])


async def test_included_routers_and_mounted_applications_are_looked_through_but_for_what_may_outlive(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    app, below, router = FastAPI(dependencies=[Depends(timed)]), FastAPI(), APIRouter()
    router.post("/orders/{order_id}", dependencies=[HELD, LATE])(lambda: None)
    app.include_router(router, prefix="/v1")
    app.mount("/below", below)
    below.add_api_websocket_route("/{order_id}", unchanged, dependencies=[HELD, LATE])
    async with lifespan_of(server.client, may_outlive=[timed])(app):
        pass
    assert early_ends(caplog) == [
        ("POST", "/v1/orders/{order_id}", "order:{order_id:int}", "session_of"),
        ("WEBSOCKET", "/{order_id}", "order:{order_id:int}", "session_of"),
    ]
    caplog.clear()
    async with lifespan_of(server.client, may_outlive=[timed, session_of])(app):
        assert early_ends(caplog) == []


def early_ends(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    records = [record.__dict__ for record in caplog.records if getattr(record, "event", "") == "lease_ends_early"]
    return [tuple(record[fact] for fact in ("method", "path", "lock", "dependency")) for record in records]


# -- clients that go away ----------------------------------------------------------------------------------


async def unchanged(request: Request, call_next: Any) -> Any:
    return await call_next(request)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a middleware"])
async def test_a_client_that_goes_away_leaves_the_queue_and_is_not_served(
    make_app: Callable[..., FastAPI], other: Coordinator, wrapped: bool
) -> None:
    app, served = make_app(), list[str]()
    if wrapped:
        app.add_middleware(BaseHTTPMiddleware, dispatch=unchanged)

    @app.post("/{order_id}")
    async def change(request: Request, lease: OrderLease) -> str:
        served.append((await request.body()).decode())
        return "done"

    lock = other.lock("order:1")
    async with uvicorn_of(app) as port, lock, raw(port) as stays, raw(port) as goes:
        await goes.send("POST", "/1", b"gone")
        await waiters(lock, 1)
        await stays.send("POST", "/1", b"a body that ", b"arrives late")
        stays.writer.write(b"arrives late")
        await waiters(lock, 2)
        await goes.go()
        await waiters(lock, 1)
        await lock.release()
        assert (await stays.until(b"\r\n")).startswith(b"HTTP/1.1 200")
    assert served == ["a body that arrives late"]
    await free(lock)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a middleware"])
async def test_a_client_that_goes_away_while_it_sends_is_no_incident(
    make_app: Callable[..., FastAPI], other: Coordinator, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    """The log has no traceback, and the endpoint is not called."""
    app, came = make_app(), asyncio.Semaphore(0)
    if wrapped:
        app.add_middleware(BaseHTTPMiddleware, dispatch=unchanged)
    statuses, served = list[int](), list[str]()

    async def watched(asgi: Any, receive: Any, send: Any) -> None:
        async def look_and_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        came.release()
        await app(asgi, receive, look_and_send)

    @app.post("/{order_id}")
    async def change(lease: OrderLease) -> None:
        served.append(lease.name)

    async with uvicorn_of(watched) as port:
        for _ in range(3):
            async with raw(port) as goes:
                await goes.send("POST", "/1", b"half", b"never sent")
                await came.acquire()
        await wait_until(lambda: len(statuses) == 3, FAST, timeout=LONG)
    assert (statuses, served) == ([499] * 3, [])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    await free(other.lock("order:1"))


async def _asgi(app: FastAPI, sync: Coordinator, sent: list[dict[str, Any]]) -> None:
    """Send one request whose client stays, without a server."""
    request = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if request:
            return request.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/1", "raw_path": b"/1", "query_string": b"", "headers": []}
    await app(scope | {"state": {"sync": sync}, "app": app, "http_version": "1.1", "scheme": "http"}, receive, send)


async def test_a_request_that_is_cancelled_at_any_await_leaves_nothing(sync: Coordinator, other: Coordinator) -> None:
    """P5, with a lease that is held twice, and a client that is watched."""
    app, lock = FastAPI(), other.lock("order:1")

    @app.post("/{order_id}", dependencies=[hold_lock("order:{order_id:int}", timeout=None, scope="request")])
    async def change(lease: OrderLease) -> None:
        await asyncio.sleep(0)

    async def check(_: Outcome[None]) -> None:
        await free(lock)

    sent: list[dict[str, Any]] = []
    result = await sweep(lambda: _asgi(app, sync, sent), check)
    assert sent[-2]["status"] == 200
    assert all(count > 3 for count in result.cancellations.values()), result.cancellations


# -- websockets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}], ids=["closed", "answered"])
async def test_a_websocket_that_cannot_have_its_lease_is_denied(
    sync: Coordinator, other: Coordinator, extensions: dict[str, Any]
) -> None:
    """One that was accepted, and meets a busy lock, is closed to be tried again."""
    app = FastAPI()
    answer_errors(app)

    @app.websocket("/{order_id}")
    async def talk(websocket: WebSocket, lease: NowOrNever, sync: Sync) -> None:
        await websocket.accept()
        await sync.lock("inner").acquire(timeout=0)

    async def connect() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/1", "raw_path": b"/1", "query_string": b"", "headers": [], "app": app}
        await app(scope | {"state": {"sync": sync}, "extensions": extensions, "scheme": "ws"}, receive, send)
        return sent

    async with other.lock("order:1"):
        first = (await connect())[0]
    expected = ("websocket.http.response.start", 423) if extensions else ("websocket.close", None)
    assert (first["type"], first.get("status")) == expected
    async with other.lock("inner"):
        accepted, closed = await connect()
    assert (accepted["type"], closed["type"], closed["code"]) == ("websocket.accept", "websocket.close", 1013)
