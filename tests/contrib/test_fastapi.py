"""Locks as dependencies of FastAPI: real servers, and clients that wait, stream, and go away."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, ClassVar
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Router

from redis_sync_aio import AcquireTimeout, Coordinator, Lease, wait_until
from redis_sync_aio.contrib.asgi import Limit
from redis_sync_aio.contrib.fastapi import Sync, answer_errors, hold_lock, hold_permit, lifespan_of
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from ..support.sweep import Outcome, sweep
from ..support.web import LONG, free, raw, uvicorn_of, waiters

OrderLease = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=None, leave_when_gone=True)]
NowOrNever = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=0)]
Streamed = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=0, scope="request")]
Permit = Annotated[Lease, hold_permit("export:{tenant}", limit=2, timeout=0)]


async def size(request: Request) -> int:
    return sum([len(chunk) async for chunk in request.stream()])


async def twice(lease: Permit) -> int:
    return lease.fence


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
        answer_errors(app)
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


async def test_a_source_that_is_none_is_refused() -> None:
    async def coroutine_function() -> None: ...

    for wrong in ("redis://x", Redis, coroutine_function):
        with pytest.raises(TypeError):
            lifespan_of(wrong)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("order:{order_id:05d}", {}, "int, str or uuid"),
        ("order:{order_id!r}", {}, "int, str or uuid"),
        ("order:{a:int}:{a}", {}, "two types"),
        ("order:{a.b}", {}, "values="),
        ("order:{}", {}, "not a template"),
        ("order:{a", {}, "not a template"),
        ("", {}, "empty"),
        ("order", {"values": {"user": current_user}}, "does not refer to 'user'"),
        ("order:{user}", {"values": {"user": "ann"}}, "must be a dependency"),
        ("order", {"timeout": -1}, "timeout"),
        ("order", {"ttl": 0}, "ttl"),
        ("order", {"scope": "forever"}, "scope"),
        ("order", {"leave_when_gone": 1}, "leave_when_gone"),
        ("order", {"max_waiting": -1}, "max_waiting"),
        ("order", {"max_waiting": "few"}, "max_waiting"),
        ("order", {"status": 200}, "status"),
        ("order", {"status": 600}, "status"),
    ],
)
def test_a_wrong_declaration_says_what_was_expected(name: str, options: dict[str, Any], found: str) -> None:
    given: dict[str, Any] = {"timeout": 1, **options}
    with pytest.raises((TypeError, ValueError), match=found):
        hold_lock(name, **given)


def test_a_permit_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="limit"):
        hold_permit("export", limit=-1, timeout=0)


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


async def test_a_busy_order_is_423_and_says_nothing_of_the_inside(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app = make_app()

    @app.post("/orders/{order_id}")
    async def change(lease: NowOrNever) -> None: ...

    lock = other.lock("order:1", ttl=600.5, auto_renew=False)
    async with uvicorn_of(app) as port, client_of(port) as client:
        async with lock as holder:
            before = holder.remaining()
            busy = await client.post("/orders/1")
            after = holder.remaining()
            assert (await client.post("/orders/2")).status_code == 200
        assert (await client.post("/orders/1")).status_code == 200
    assert busy.status_code == 423
    assert math.ceil(after) <= int(busy.headers["Retry-After"]) <= math.ceil(before)
    assert "order:1" not in busy.text
    assert holder.token not in busy.text


async def test_a_full_queue_is_429_immediately_and_the_status_of_a_busy_name_is_chosen(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app, lock, permits = make_app(), other.lock("order:1"), other.semaphore("export:1", limit=1)
    queued = hold_lock("order:{order_id:int}", timeout=None, max_waiting=1, status=409)
    app.post("/orders/{order_id}", dependencies=[queued])(lambda: None)
    app.post("/exports/{tenant}", dependencies=[hold_permit("export:{tenant}", limit=1, timeout=None, max_waiting=1)])(
        lambda: None
    )
    app.post("/now/{order_id}", dependencies=[hold_lock("order:{order_id:int}", timeout=0, status=409)])(lambda: None)
    paths, described = ["/orders/1", "/exports/1"], app.openapi()["paths"]
    assert set(described["/orders/{order_id}"]["post"]["responses"]) == {"200", "422", "409", "429", "503"}
    assert set(described["/exports/{tenant}"]["post"]["responses"]) == {"200", "422", "423", "429", "503"}
    assert set(described["/now/{order_id}"]["post"]["responses"]) == {"200", "422", "409", "503"}
    async with uvicorn_of(app) as port, client_of(port) as client, asyncio.timeout(LONG):
        async with lock, permits:
            waiting = [asyncio.create_task(client.post(path)) for path in paths]
            await waiters(lock, 1)
            await waiters(permits, 1)
            full = [await client.post(path) for path in paths]
            busy = await client.post("/now/1")
        assert [(await it).status_code for it in waiting] == [200, 200]
    said = (429, {"detail": "too many requests wait for this: try again later"})
    assert [(it.status_code, it.json()) for it in full] == [said] * 2
    assert busy.status_code == 409
    assert all(1 <= int(it.headers["Retry-After"]) <= 30 for it in (*full, busy))


async def test_errors_of_locks_inside_are_503_and_stand_in_the_log(
    make_app: Callable[..., FastAPI], other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A timeout of an inner lock is not taken for that of the endpoint, and a loss is no success."""
    app = make_app()

    @app.post("/inner/{order_id}")
    async def inner(lease: NowOrNever, sync: Sync) -> None:
        await sync.lock("inner").acquire(timeout=0)

    @app.post("/lost/{order_id}")
    async def lost(lease: NowOrNever) -> None:
        await other.lock(lease.name).force_release()
        await lease.extend(30)

    async with uvicorn_of(app) as port, client_of(port) as client, other.lock("inner"):
        answers = [await client.post(path) for path in ("/inner/1", "/lost/1")]
    assert [(it.status_code, it.headers["Retry-After"]) for it in answers] == [(503, "1")] * 2
    assert {it.text for it in answers} == {'{"detail":"the service is not available: try again"}'}
    told = [record for record in caplog.records if getattr(record, "event", "") == "request_not_served"]
    assert [record.__dict__["kind"] for record in told] == ["AcquireTimeout", "LeaseLost"]


async def test_a_group_of_such_errors_is_503_and_one_with_another_error_is_not(
    make_app: Callable[..., FastAPI], other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A TaskGroup raises a group. A bug of one of its tasks is not hidden by an answer that asks for another try."""
    app = make_app()

    async def fail() -> None:
        raise KeyError("a bug")

    @app.post("/{order_id}")
    async def change(lease: NowOrNever, sync: Sync, with_a_bug: bool) -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("inner", "other"):
                group.create_task(sync.lock(name).acquire(timeout=0))
            if with_a_bug:
                group.create_task(fail())

    async with uvicorn_of(app) as port, client_of(port) as client, other.lock("inner"), other.lock("other"):
        answer = await client.post("/1?with_a_bug=false")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert (await client.post("/1?with_a_bug=true")).status_code == 500
    [told] = [record for record in caplog.records if getattr(record, "event", "") == "request_not_served"]
    assert (told.__dict__["kind"], "'inner'" in told.message or "'other'" in told.message) == ("AcquireTimeout", True)


async def test_handlers_that_the_application_has_are_left_alone(server: EmbeddedServer, other: Coordinator) -> None:
    async def own(request: Request, error: Exception) -> Response:
        return Response(status_code=418)

    handlers: dict[Any, Any] = {ExceptionGroup: own, AcquireTimeout: own}
    app = FastAPI(lifespan=lifespan_of(server.client), exception_handlers=handlers)
    answer_errors(app)

    @app.get("/orders/{order_id}")
    async def order(lease: NowOrNever) -> None: ...

    @app.get("/")
    async def read() -> None:
        raise ExceptionGroup("all of them", [LookupError()])

    async with uvicorn_of(app) as port, client_of(port) as client, other.lock("order:1"):
        assert (await client.get("/")).status_code == 418
        assert (await client.get("/orders/1")).status_code == 418


@pytest.mark.parametrize("kind", [FastAPI, Starlette, Router])
@pytest.mark.parametrize("served_alone", [False, True], ids=["new", "served alone before"])
async def test_mounted_applications_answer_as_the_one_that_they_are_mounted_in(
    make_app: Callable[..., FastAPI], other: Coordinator, kind: type, served_alone: bool
) -> None:
    """At any depth, and in middleware. Their own handlers are left alone."""

    async def busy(request: Request) -> Response:
        await request.state.sync.lock("inner").acquire(timeout=0)
        raise AssertionError

    async def own(request: Request, error: Exception) -> Response:
        return Response(status_code=418)

    app, below, wrapped = make_app(), FastAPI(exception_handlers={LookupError: own}), kind()

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
        answer = await client.get("/below/wrapped/busy")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert set(below.openapi()["paths"]["/orders/{order_id}"]["post"]["responses"]) == {"200", "422", "423", "503"}


async def test_more_errors_can_be_answered(server: EmbeddedServer, redis: Redis) -> None:
    app = FastAPI(lifespan=lifespan_of(server.client))
    answer_errors(app, also=[LookupError])

    @app.get("/")
    async def read() -> None:
        raise KeyError("secret")

    async with uvicorn_of(app) as port, client_of(port) as client:
        answer = await client.get("/")
    assert (answer.status_code, "secret" in answer.text) == (503, False)
    with pytest.raises(TypeError, match="classes of exceptions"):
        answer_errors(app, also=["LookupError"])  # type: ignore[list-item]


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


@pytest.mark.parametrize("scope", ["function", "request"])
async def test_the_lease_is_released_before_or_after_the_response_as_declared(
    make_app: Callable[..., FastAPI], other: Coordinator, scope: str
) -> None:
    app, held = make_app(), list[bool]()

    async def function_scope(lease: NowOrNever) -> None: ...
    async def request_scope(lease: Streamed) -> None: ...

    app.post("/{order_id}")({"function": function_scope, "request": request_scope}[scope])

    async def watched(asgi: Any, receive: Any, send: Any) -> None:
        async def look_and_send(message: Any) -> None:
            if asgi["type"] == "http":
                held.append(await other.lock("order:1").locked())
            await send(message)

        await app(asgi, receive, look_and_send)

    async with uvicorn_of(watched) as port, client_of(port) as client:
        assert (await client.post("/1")).status_code == 200
    assert held == [scope == "request"] * 2  # the start of the response, its body
    assert not await other.lock("order:1").locked()


async def test_one_request_holds_a_lock_once_and_its_permits_are_limited(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app = make_app(dependencies=[])
    inside, go_on = asyncio.Semaphore(0), asyncio.Event()

    @app.get("/{tenant}")
    async def export(lease: Permit, again: Annotated[int, Depends(twice)]) -> bool:
        inside.release()
        await go_on.wait()
        return lease.fence == again

    async with uvicorn_of(app) as port, client_of(port) as client, asyncio.timeout(LONG):
        two = [asyncio.create_task(client.get("/acme")) for _ in range(2)]
        for _ in two:
            await inside.acquire()
        assert (await client.get("/acme")).status_code == 423
        go_on.set()
        assert [(await one).json() for one in two] == [True, True]
        assert (await client.get("/other")).json()
    assert (await other.semaphore("export:acme", limit=None).statistics()).held == 0


@pytest.mark.parametrize("first", ["short", "long"])
async def test_two_holds_of_a_name_in_a_request_are_one_lease_which_ends_with_the_last_of_them(
    make_app: Callable[..., FastAPI], other: Coordinator, first: str
) -> None:
    """The second one does not wait for the first. One ends before the response, the other one after it."""
    app, lock, permits = make_app(), other.lock("order:1"), other.semaphore("export", limit=None)
    short, long = (hold_lock("order:{order_id:int}", timeout=0, scope=scope) for scope in ("function", "request"))
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


class Session:
    """A session as of a database: ``commit`` writes what it has changed, a few turns of the loop later."""

    stock: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.changed: dict[str, int] = {}

    async def commit(self, sync: Coordinator) -> None:
        for _ in range(3):
            await sync.client.ping()
        self.stock.update(self.changed)


async def session_of(sync: Sync) -> AsyncIterator[Session]:
    session = Session()
    yield session
    await session.commit(sync)


def timed() -> Iterator[None]:
    yield


Late = Annotated[Session, Depends(session_of)]
Early = Annotated[Session, Depends(session_of, scope="function")]
OneByOne = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=None)]
UntilSent = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=None, scope="request")]


async def late(lease: OneByOne, session: Late) -> None:
    session.changed["sold"] = session.stock["sold"] + 1


async def before(session: Early, lease: OneByOne) -> None:
    await late(lease, session)


async def late_before(session: Late, lease: UntilSent) -> None:
    await late(lease, session)


async def early(lease: OneByOne, session: Early) -> None:
    await late(lease, session)


async def until_sent(lease: UntilSent, session: Late) -> None:
    await late(lease, session)


@pytest.mark.parametrize("endpoint", [early, until_sent])
async def test_an_endpoint_whose_session_commits_before_its_lease_ends_loses_no_update(
    make_app: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture, endpoint: Callable[..., Any]
) -> None:
    app = make_app()
    app.post("/{order_id}")(endpoint)
    Session.stock["sold"] = 0
    async with uvicorn_of(app) as port, client_of(port) as client, asyncio.timeout(LONG):
        answers = await asyncio.gather(*(client.post("/1") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert Session.stock["sold"] == 8
    assert early_ends(caplog) == []


@pytest.mark.parametrize("endpoint", [late, before, late_before])
async def test_an_endpoint_whose_lease_ends_before_its_session_commits_is_named_at_the_start(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture, endpoint: Callable[..., Any]
) -> None:
    """Also in included routers and mounted applications. ``may_outlive`` says that it is meant."""
    app, below, router = FastAPI(dependencies=[Depends(timed)]), FastAPI(), APIRouter()
    router.post("/orders/{order_id}")(endpoint)
    router.get("/orders/{order_id}")(until_sent)
    app.include_router(router, prefix="/v1")
    app.mount("/below", below)
    below.websocket("/{order_id}")(endpoint)
    async with lifespan_of(server.client, may_outlive=[timed])(app):
        pass
    assert early_ends(caplog) == [
        ("POST", "/v1/orders/{order_id}", "order:{order_id:int}", "session_of"),
        ("WEBSOCKET", "/{order_id}", "order:{order_id:int}", "session_of"),
    ]
    caplog.clear()
    async with lifespan_of(server.client, may_outlive=[timed, session_of])(app):
        assert early_ends(caplog) == []
    with pytest.raises(TypeError, match="may_outlive must be a dependency"):
        lifespan_of(server.client, may_outlive=["session_of"])  # type: ignore[list-item]


async def test_holds_of_one_name_end_with_the_last_of_them_and_dependencies_that_end_earlier_do_not_count(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    class Timed:
        def __call__(self) -> Iterator[None]:
            yield

    app = FastAPI(lifespan=lifespan_of(server.client))
    held = hold_lock("order:{order_id:int}", timeout=None)
    longer = hold_lock("order:{order_id:int}", timeout=None, scope="request")
    instance, partial = Timed(), functools.partial(timed)
    app.get("/a/{order_id}", dependencies=[longer, Depends(instance), held])(lambda: None)
    app.get("/b/{order_id}", dependencies=[held, Depends(instance, scope="function"), Depends(current_user)])(
        lambda: None
    )
    app.get("/c/{order_id}", dependencies=[Depends(Timed), Depends(partial), held])(lambda: None)
    app.get(
        "/d/{order_id}", dependencies=[Depends(instance, scope="function"), held, Depends(instance, scope="function")]
    )(lambda: None)
    app.get("/e", dependencies=[Depends(instance)])(lambda: None)
    async with app.router.lifespan_context(app):
        found = [(path, dependency) for _, path, _, dependency in early_ends(caplog)]
    assert found == [("/c/{order_id}", repr(partial)), ("/d/{order_id}", repr(instance))]


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


async def test_a_body_that_was_read_by_another_dependency_does_not_matter(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app = make_app()

    @app.post("/{order_id}")
    async def change(read: Annotated[int, Depends(size)], lease: OrderLease) -> int:
        return read

    lock = other.lock("order:1")
    async with uvicorn_of(app) as port, client_of(port) as client, lock:
        async with raw(port) as goes:
            await goes.send("POST", "/1", b"abc")
            await waiters(lock, 1)
        await waiters(lock, 0)
        await lock.release()
        assert (await client.post("/1", content=b"abc")).json() == 3


async def test_a_client_that_goes_away_while_it_sends_or_streams_holds_nothing(
    make_app: Callable[..., FastAPI], other: Coordinator
) -> None:
    app, lock = make_app(), other.lock("order:1")

    @app.post("/{order_id}")
    async def change(lease: OrderLease) -> None: ...

    @app.get("/{order_id}")
    async def stream(lease: Streamed) -> StreamingResponse:
        async def forever() -> AsyncIterator[str]:
            yield "first"
            await asyncio.Event().wait()

        return StreamingResponse(forever())

    async with uvicorn_of(app) as port:
        async with raw(port) as sends:
            await sends.send("POST", "/1", b"half", b"never sent")
        async with raw(port) as streams:
            await streams.send("GET", "/1")
            await streams.until(b"first")
            assert await lock.locked()
        await free(lock)


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
    assert (first["type"], first.get("status")) == (
        ("websocket.http.response.start", 423) if extensions else ("websocket.close", None)
    )
    async with other.lock("inner"):
        accepted, closed = await connect()
    assert (accepted["type"], closed["type"], closed["code"]) == ("websocket.accept", "websocket.close", 1013)
