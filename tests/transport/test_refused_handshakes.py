"""D16: what the server answers while a client connects is told as it is, on every way to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import CommandRefused, Coordinator, Unreachable, transaction
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.inside import now
from ..support.transactions import increment

RETRY_FOR = 5.0
REFUSED: dict[str, tuple[dict[str, Any], type[CommandRefused], str, str]] = {
    "wrong password": ({"password": "wrong"}, PermissionDenied, "WRONGPASS", "check the username and password"),
    "no password": ({}, PermissionDenied, "NOAUTH", "give the client a username and password"),
    "no such database": ({"password": "secret", "db": 99}, CommandRefused, "ERR", "DB index is out of range"),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedServer]:
    """A server that asks for a password."""
    with EmbeddedServer(port=0, args=("--requirepass", "secret")) as running:
        yield running


async def lock(sync: Coordinator) -> None:
    await sync.lock("n").acquire()


async def change(sync: Coordinator) -> None:
    await transaction(sync, increment, "n")


WAYS: dict[str, tuple[dict[str, Any], Callable[[Coordinator], Awaitable[None]]]] = {
    "link": ({}, lock),
    "plain": ({"push": "never"}, lock),
    "transaction": ({}, change),
}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("address", ["tcp", "unix"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_handshake_is_reported_immediately(
    guarded: EmbeddedServer, case: str, address: str, way: str, protocol: int
) -> None:
    options, kind, code, advice = REFUSED[case]
    coordinator_options, use = WAYS[way]
    where: dict[str, Any] = {"port": guarded.port} if address == "tcp" else {"unix_socket_path": guarded.unix_socket}
    once = Retry(NoBackoff(), 0)  # redis-py's own attempts, of which transactions and polls wait for the end
    async with (
        Redis(**where, **options, protocol=protocol, retry=once) as client,
        Coordinator(client, retry_for=RETRY_FOR, **coordinator_options) as sync,
    ):
        start = now()
        with pytest.raises(CommandRefused, match=advice) as refused:
            await use(sync)
        assert now() - start < RETRY_FOR / 2
        assert (type(refused.value), refused.value.code) == (kind, code)


async def test_a_proxy_that_hangs_up_at_hello(server: EmbeddedServer) -> None:
    """P12: the error says how locks work there; once is no reason, as a server that stops does the same."""
    async with FaultProxy(server) as proxy, proxy.client(protocol=2) as client:
        hello = proxy.on("HELLO", Action.CUT_BEFORE, times=None)
        async with Coordinator(client, retry_for=RETRY_FOR) as sync:
            locking = asyncio.ensure_future(lock(sync))
            await proxy.until(lambda: hello.acted == 2)
            assert "HELLO" not in str(sync.connection_error)
            with pytest.raises(Unreachable, match=r'closed the connection \d+ times at HELLO 3; .*push="never"'):
                await locking
        async with Coordinator(client, push="never") as sync:
            await lock(sync)
