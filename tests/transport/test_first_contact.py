"""A server that has never answered is given up after a second; one that has answered is waited for (`retry_for`)."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, LeaderElection, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.testing.servers import SentinelTopology

from ..support.embedded import free_port
from ..support.inside import now

RETRY_FOR = 60.0
SOON = 30.0
"""Seconds, half of `RETRY_FOR`: an error that comes earlier did not wait for that."""
Use: TypeAlias = Callable[[Coordinator], Awaitable[None]]
PUSH = pytest.mark.parametrize("push", ["auto", "never"])


@pytest.fixture
def port() -> int:
    with free_port() as found:
        return found


async def lock(sync: Coordinator) -> None:
    async with AsyncLock(sync, "orders"):
        raise AssertionError("there is no server")


async def permit(sync: Coordinator) -> None:
    await AsyncSemaphore(sync, "permits", 3).acquire(timeout=RETRY_FOR)


async def locked(sync: Coordinator) -> None:
    await AsyncLock(sync, "orders").locked()


async def wait(sync: Coordinator) -> None:
    await sync.event("started").wait()


async def both(sync: Coordinator) -> None:
    async with sync.multi_lock(["orders", "stock"]):
        raise AssertionError("there is no server")


@asynccontextmanager
async def gives_up(where: str) -> AsyncIterator[None]:
    """The body raises Unreachable long before `RETRY_FOR`; the error has one traceback, and names the address."""
    begin = now()
    with pytest.raises(Unreachable) as caught:
        yield
    assert now() - begin < SOON
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1, shown
    assert f"no Redis has answered at {where} yet, so " in str(caught.value)
    assert re.search("Connect call failed|Connection refused|No such file", str(caught.value))
    assert "check the address, and start the server first" in str(caught.value)


@PUSH
@pytest.mark.parametrize("use", [lock, permit, locked, wait, both])
async def test_an_address_where_nothing_listens(
    port: int, push: Any, use: Callable[[Coordinator], Awaitable[None]]
) -> None:
    async with Redis(port=port) as redis, Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync:
        for _ in range(2):  # the next one, too
            async with gives_up(f"localhost:{port}"):
                await use(sync)


@pytest.mark.real
async def test_an_address_where_nothing_listens_in_real_time(port: int) -> None:
    """As asyncio connects, whose errors have other words."""
    async with (
        Redis(port=port) as redis,
        Coordinator(redis, retry_for=RETRY_FOR) as sync,
        gives_up(f"localhost:{port}"),
    ):
        await lock(sync)


@PUSH
async def test_a_cluster_where_nothing_listens(port: int, push: Any) -> None:
    redis = RedisCluster(host="127.0.0.1", port=port)
    async with Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync, gives_up(f"a cluster at 127.0.0.1:{port}"):
        await lock(sync)
    await redis.aclose()


@PUSH
async def test_sentinels_of_which_none_listens(port: int, push: Any) -> None:
    """redis-py asks each of them for seconds, one after the other."""
    sentinel: Any = Sentinel([("127.0.0.1", port)] * 3)  # type: ignore[no-untyped-call]
    async with (
        sentinel.master_for("nowhere") as redis,
        Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync,
        gives_up("'nowhere' of Sentinel"),
    ):
        await lock(sync)
    for one in sentinel.sentinels:
        await one.aclose()


@PUSH
async def test_a_sentinel_that_listens_is_found_behind_one_that_does_not(
    group: SentinelTopology, port: int, push: Any
) -> None:
    sentinel: Any = Sentinel([("127.0.0.1", port), ("127.0.0.1", group.ports[0])])  # type: ignore[no-untyped-call]
    async with (
        sentinel.master_for(group.group) as redis,
        Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync,
        AsyncLock(sync, "orders"),
    ):
        pass
    for one in sentinel.sentinels:
        await one.aclose()


async def test_a_unix_socket_that_is_not_there(tmp_path: Any) -> None:
    path = f"{tmp_path}/redis.sock"
    async with (
        Redis(unix_socket_path=path) as redis,
        Coordinator(redis, retry_for=RETRY_FOR) as sync,
        gives_up(f"unix:{path}"),
    ):
        await lock(sync)


async def test_a_bare_client(port: int) -> None:
    """Its coordinator is an implicit one, with the default `retry_for`, 10 seconds."""
    async with Redis(port=port) as redis:
        with pytest.raises(Unreachable, match="no Redis has answered at"):
            await AsyncLock(redis, "orders").acquire()


@PUSH
async def test_a_server_that_starts_half_a_second_later_is_reached(push: Any) -> None:
    with EmbeddedServer(port=0) as server:
        server.kill()
        async with server.client() as redis, Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync:
            asking = asyncio.create_task(AsyncLock(sync, "orders").acquire())
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.restart, False)
            async with await asking:
                pass


@PUSH
@pytest.mark.parametrize("again", [False, True])
async def test_a_server_that_has_answered_is_waited_for(push: Any, again: bool) -> None:
    """Also by a coordinator that is made in the outage (``again``): this process knows the address."""
    with EmbeddedServer(port=0) as server:
        async with server.client() as redis, Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync:
            async with AsyncLock(sync, "orders"):
                pass
            server.kill()
            async with Coordinator(redis, push=push, retry_for=RETRY_FOR) as other:
                asking = asyncio.create_task(AsyncLock(other if again else sync, "orders").acquire())
                await asyncio.sleep(2.5)  # more than the second after which it would be given up
                assert not asking.done()
                await asyncio.to_thread(server.restart, False)
                async with await asking:
                    pass


async def test_retry_for_holds_after_an_answer() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as redis, Coordinator(redis, retry_for=3) as sync:
            await AsyncLock(sync, "orders").locked()
            server.kill()
            begin = now()
            with pytest.raises(Unreachable, match=r"within 3\.\d seconds"):
                await AsyncLock(sync, "orders").locked()
            assert now() - begin >= 2.9


@PUSH
async def test_a_port_that_is_silent_or_hangs_up_is_no_refusal(push: Any) -> None:
    """Something is there. It may be a server that starts, or a proxy in front of one."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1")
    port = listener.sockets[0].getsockname()[1]
    async with listener, Redis(port=port) as redis, Coordinator(redis, push=push, retry_for=2.5) as sync:
        begin = now()
        with pytest.raises(Unreachable, match="Redis did not answer"):
            await lock(sync)
        assert now() - begin >= 2.4


@PUSH
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_first_contact_can_be_ended(port: int, push: Any, how: str) -> None:
    async with Redis(port=port) as redis, Coordinator(redis, push=push, retry_for=RETRY_FOR) as sync:
        asking = asyncio.create_task(AsyncLock(sync, "orders").locked())
        await asyncio.sleep(0.05)
        if how == "cancelled":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            await sync.aclose()
            with pytest.raises(CoordinatorClosed, match="orders"):
                await asking


async def test_a_leader_stands_until_its_server_starts(caplog: pytest.LogCaptureFixture) -> None:
    """`election.run` outlasts it: a service may start before its server."""
    with EmbeddedServer(port=0) as server:
        server.kill()
        async with server.client() as redis, Coordinator(redis) as sync:

            async def work(term: object) -> str:
                return "led"

            with caplog.at_level(logging.WARNING, "redis_sync_aio"):
                running = asyncio.create_task(LeaderElection(sync, "scheduler").run(work))
                async with asyncio.timeout(60):
                    while "no Redis has answered" not in caplog.text:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(server.restart, False)
                    assert await running == "led"
