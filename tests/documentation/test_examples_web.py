"""The services among the examples do what they say, under concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until
from redis_sync_aio.contrib.aiohttp import SYNC
from redis_sync_aio.contrib.aiohttp import hold_lock as hold_lock_of_aiohttp
from redis_sync_aio.contrib.fastapi import hold_lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing import run_lifespan

from ..support.examples import load
from ..support.examples import redis as redis
from ..support.examples import rival as rival
from ..support.examples import server as server
from ..support.proxy import FaultProxy

pytestmark = pytest.mark.timing
UNAVAILABLE = {"detail": "the service is not available: try again"}
NO_PATIENCE = 0.5  # seconds that a service waits for its turn where the test wants to see it give up

fastapi_service = load("fastapi_service")
aiohttp_service = load("aiohttp_service")


async def waiters(lock: AsyncLock, count: int) -> None:
    async def reached() -> bool:
        return (await lock.statistics()).waiting == count

    await wait_until(reached, timeout=10)


# -- FastAPI -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(
    app: FastAPI, patience: float | None = None, send_by: Callable[[Any], Any] = lambda send: send
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose lifespan runs. ``patience``: how long it waits, instead of the example's own time."""
    if patience is not None:
        other = hold_lock("lock:order:{order_id:int}", timeout=patience, ttl=10, leave_when_gone=True)
        assert other.dependency is not None
        app.dependency_overrides[fastapi_service.order_lock.dependency] = other.dependency
    async with run_lifespan(app) as running:

        async def sending(scope: Any, receive: Any, send: Any) -> None:
            await running(scope, receive, send_by(send))

        async with httpx.AsyncClient(transport=httpx.ASGITransport(sending), base_url="http://x") as client:
            yield client


async def test_fastapi_concurrent_requests_to_two_instances_lose_no_item(server: EmbeddedServer, redis: Redis) -> None:
    async with (
        started(fastapi_service.create_app(server.url), 30) as one,
        started(fastapi_service.create_app(server.url), 30) as two,
    ):
        answers = await asyncio.gather(
            *(client.post("/orders/1/items?price=3") for _ in range(40) for client in (one, two))
        )
        order = (await two.get("/orders/1")).json()
    assert [answer.status_code for answer in answers] == [200] * 80
    assert (order["items"], order["total"]) == (80, 240)
    saved = sorted((answer.json() for answer in answers), key=lambda order: order["fence"])
    assert [order["items"] for order in saved] == list(range(1, 81)), "the fences follow the order of the writes"
    assert len({order["fence"] for order in saved}) == 80


async def test_fastapi_without_the_lock_items_would_be_lost(
    server: EmbeddedServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = fastapi_service.create_app(server.url)
    all_have_read = asyncio.Barrier(40)

    class NoLease:
        fence = 0

    async def load_before_any_saves(*_: object) -> Any:
        await all_have_read.wait()
        return fastapi_service.Order()

    app.dependency_overrides[fastapi_service.order_lock.dependency] = NoLease
    async with started(app) as client:
        with monkeypatch.context() as patch:
            patch.setattr(fastapi_service.Orders, "load", load_before_any_saves)
            await asyncio.gather(*(client.post("/orders/1/items?price=3") for _ in range(40)))
        assert (await client.get("/orders/1")).json()["items"] == 1


async def test_fastapi_busy_order_is_423_with_retry_after(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = AsyncLock(rival, "lock:order:1", ttl=7, auto_renew=False)
    async with started(fastapi_service.create_app(server.url), NO_PATIENCE) as client:
        lease = await lock.acquire()  # without a body: the application runs in this task, too
        answer = await client.post("/orders/1/items?price=3")
        assert (await lock.statistics()).waiting == 0, "who gave up has left the queue"
        assert (await client.post("/orders/2/items?price=3")).status_code == 200, "other orders are free"
        await lease.release()
        assert answer.status_code == 423
        assert answer.json() == {"detail": "other requests are at work on this: try again later"}
        assert answer.headers["Retry-After"] in ("6", "7")  # what remained of the lease, rounded up
        assert (await client.get("/orders/1")).json()["items"] == 0
        assert (await client.post("/orders/1/items?price=3")).status_code == 200


async def test_fastapi_waits_its_turn(server: EmbeddedServer, redis: Redis, rival: Coordinator) -> None:
    lock = rival.lock("lock:order:1")
    async with started(fastapi_service.create_app(server.url), 30) as client:
        async with lock:
            request = asyncio.create_task(client.post("/orders/1/items?price=3"))
            await waiters(lock, 1)
            assert not request.done()
        assert (await request).status_code == 200


async def test_fastapi_releases_before_the_response_is_sent(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    held: list[bool] = []

    def looking(send: Any) -> Any:
        async def look_and_send(message: Any) -> None:
            held.append(await rival.lock("lock:order:1").locked())
            await send(message)

        return look_and_send

    async with started(fastapi_service.create_app(server.url), send_by=looking) as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert held == [False, False]  # the start of the response, its body


async def test_fastapi_lost_lease_ends_the_endpoint_with_503(
    server: EmbeddedServer, redis: Redis, rival: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, working = rival.lock("lock:order:1"), asyncio.Event()

    async def slow_load(*_: object) -> None:
        working.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fastapi_service.Orders, "load", slow_load)
    async with started(fastapi_service.create_app(server.url), 30) as client:
        async with lock:
            request = asyncio.create_task(client.post("/orders/1/items?price=3"))
            await waiters(lock, 1)
        await asyncio.wait_for(working.wait(), 10)
        await lock.force_release()
        answer = await asyncio.wait_for(request, 10)  # noticed at the first renewal: a third of the claim
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.json() == UNAVAILABLE


async def test_fastapi_fence_keeps_a_late_write_out(server: EmbeddedServer, redis: Redis) -> None:
    await redis.hset("order:1", mapping={"fence": 9 * 10**15, "items": 5, "total": 50})
    async with started(fastapi_service.create_app(server.url)) as client:
        answer = await client.post("/orders/1/items?price=3")
    assert answer.status_code == 503
    assert await redis.hgetall("order:1") == {"fence": "9000000000000000", "items": "5", "total": "50"}


async def test_fastapi_unreachable_redis_is_503_until_it_is_back() -> None:
    async with (
        EmbeddedServer() as server,
        started(fastapi_service.create_app(server.url), 0.3) as client,
    ):
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
        server.kill()
        answer = await client.post("/orders/1/items?price=3")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        server.start()

        async def back() -> bool:
            return (await client.post("/orders/1/items?price=3")).status_code == 200

        await wait_until(back, timeout=20)


async def test_fastapi_a_server_that_hangs_is_503(
    server: EmbeddedServer, redis: Redis, rival: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Not 423, although somebody holds the lock; and the answer says nothing about the server."""
    lock = rival.lock("lock:order:1")
    async with (
        FaultProxy(server.unix_socket) as proxy,
        started(fastapi_service.create_app(proxy.url)) as client,
    ):
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
        async with lock:
            queued = asyncio.create_task(client.post("/orders/1/items?price=3"))
            await waiters(lock, 1)
            proxy.black_hole = True
            answers = await asyncio.gather(queued, client.post("/orders/1/items?price=3"))
            proxy.black_hole = False
    assert [(answer.status_code, answer.json()) for answer in answers] == [(503, UNAVAILABLE)] * 2
    assert "POST /orders/1/items: " in caplog.text


async def test_fastapi_an_inner_lock_that_is_busy_is_not_taken_for_the_order(
    server: EmbeddedServer, redis: Redis, rival: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = rival.lock("inner")

    async def load(*_: object) -> None:
        async with inner.acquire(timeout=0):
            raise AssertionError

    monkeypatch.setattr(fastapi_service.Orders, "load", load)
    async with started(fastapi_service.create_app(server.url)) as client, inner:
        answer = await client.post("/orders/1/items?price=3")
    assert (answer.status_code, answer.json()) == (503, UNAVAILABLE)


async def test_fastapi_takes_redis_from_the_environment_else_embeds_it(
    server: EmbeddedServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    async with started(fastapi_service.create_app()) as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert not await redis.exists("order:1")
    monkeypatch.setenv("REDIS_URL", server.url)
    async with started(fastapi_service.create_app()) as client:
        assert (await client.post("/orders/1/items?price=3")).status_code == 200
    assert await redis.exists("order:1")


# -- aiohttp -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A client of an app that listens."""
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_aiohttp_concurrent_requests_to_two_instances_lose_no_cent(server: EmbeddedServer, redis: Redis) -> None:
    async with (
        served(aiohttp_service.create_app(server.url, patience=30)) as one,
        served(aiohttp_service.create_app(server.url, patience=30)) as two,
    ):

        async def deposit(client: TestClient[web.Request, web.Application]) -> dict[str, int]:
            async with client.post("/accounts/ann/deposits?cents=7") as answer:
                assert answer.status == 200
                account: dict[str, int] = await answer.json()
                return account

        accounts = await asyncio.gather(*(deposit(client) for _ in range(40) for client in (one, two)))
        async with two.get("/accounts/ann") as answer:
            assert (await answer.json())["cents"] == 7 * 80
    in_order = sorted(accounts, key=lambda account: account["fence"])
    assert [account["cents"] for account in in_order] == [7 * n for n in range(1, 81)]


async def test_aiohttp_busy_account_is_423_with_retry_after(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = AsyncLock(rival, "lock:account:ann", ttl=7, auto_renew=False)
    async with served(aiohttp_service.create_app(server.url, patience=NO_PATIENCE)) as client:
        async with lock, client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 423
            assert answer.headers["Retry-After"] in ("6", "7")
            assert await answer.json() == {"detail": "other requests are at work on this: try again later"}
            assert (await lock.statistics()).waiting == 0
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 200


async def test_aiohttp_client_that_goes_away_leaves_the_queue(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    lock = rival.lock("lock:account:ann")
    async with served(aiohttp_service.create_app(server.url, patience=30)) as client:
        async with lock:
            gone = asyncio.create_task(client.post("/accounts/ann/deposits?cents=7").__aenter__())
            await waiters(lock, 1)
            gone.cancel()
            await waiters(lock, 0)
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert (await answer.json())["cents"] == 7


async def test_aiohttp_fence_keeps_a_late_write_out(server: EmbeddedServer, redis: Redis) -> None:
    await redis.hset("account:ann", mapping={"fence": 9 * 10**15, "cents": 5})
    async with (
        served(aiohttp_service.create_app(server.url)) as client,
        client.post("/accounts/ann/deposits?cents=7") as answer,
    ):
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
    assert await redis.hgetall("account:ann") == {"fence": "9000000000000000", "cents": "5"}


async def test_aiohttp_other_errors_pass_and_release(server: EmbeddedServer, redis: Redis, rival: Coordinator) -> None:
    async with (
        served(aiohttp_service.create_app(server.url)) as client,
        client.post("/accounts/ann/deposits?cents=many") as answer,
    ):
        assert answer.status == 400
        assert not await rival.lock("lock:account:ann").locked()


async def test_aiohttp_unreachable_redis_is_503() -> None:
    async with (
        EmbeddedServer() as server,
        served(aiohttp_service.create_app(server.url, patience=0.3)) as client,
    ):
        server.kill()
        async with client.post("/accounts/ann/deposits?cents=7") as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"


async def test_aiohttp_a_server_that_hangs_is_503(
    server: EmbeddedServer, redis: Redis, rival: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Not 423, although somebody holds the lock; and the answer says nothing about the server."""
    lock = rival.lock("lock:account:ann")
    async with (
        FaultProxy(server.unix_socket) as proxy,
        served(aiohttp_service.create_app(proxy.url)) as client,
    ):

        async def deposit() -> tuple[int, Any]:
            async with client.post("/accounts/ann/deposits?cents=7") as answer:
                return answer.status, await answer.json()

        assert await deposit() == (200, ANY)
        async with lock:
            queued = asyncio.create_task(deposit())
            await waiters(lock, 1)
            proxy.black_hole = True
            answers = await asyncio.gather(queued, deposit())
            proxy.black_hole = False
    assert list(answers) == [(503, UNAVAILABLE)] * 2
    assert "POST /accounts/ann/deposits: " in caplog.text


async def test_aiohttp_an_inner_lock_that_is_busy_is_not_taken_for_the_account(
    server: EmbeddedServer, redis: Redis, rival: Coordinator
) -> None:
    async def handler(request: web.Request, lease: Lease) -> web.Response:
        async with request.app[SYNC].lock("inner").acquire(timeout=0):
            raise AssertionError

    app = aiohttp_service.create_app(server.url)
    app.router.add_post("/inner/{account}", hold_lock_of_aiohttp("lock:{account}", timeout=0)(handler))
    async with served(app) as client, rival.lock("inner"), client.post("/inner/ann") as answer:
        assert (answer.status, await answer.json()) == (503, UNAVAILABLE)
