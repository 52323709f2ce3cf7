"""FAULTS C3, C4: a connection is silent: a NAT has dropped it without notice, or a reply of its handshake is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action

from ..support.inside import now
from ..support.proxy import SWALLOW_REPLY, SWALLOW_REQUEST, FaultProxy, anything
from ..support.wired import quiet_loop as quiet_loop

TIMEOUT = 3.0
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # options of the client, those of the coordinator, seconds of silence
    "link": ({}, {}, 2.2),
    "link, health checks": ({"health_check_interval": 1}, {}, 1.2),
    "polling": ({"socket_timeout": 20}, {"push": "never"}, 2.2),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_first_requests_after_a_silence_are_served(server: EmbeddedServer, way: str) -> None:
    """Well within the time that a reply may take: it is another connection that answers."""
    client_options, options, silence = WAYS[way]
    async with (
        FaultProxy(server) as proxy,
        proxy.client(**client_options) as client,
        Coordinator(client, response_timeout=20, **options) as sync,
    ):
        locks = [sync.lock(f"after a silence:{number}") for number in range(3)]
        await asyncio.gather(*[(await lock.acquire()).release() for lock in locks])
        dropped = proxy.connections
        await asyncio.sleep(silence)
        for _ in range(dropped):
            proxy.on(anything, SWALLOW_REQUEST, times=1)
        begun = now()
        leases = await asyncio.gather(*[lock.acquire(timeout=TIMEOUT * 3) for lock in locks])
        assert now() - begun < TIMEOUT * 2
        assert proxy.connections > dropped
        for lease in leases:
            await lease.release()


async def test_a_slow_server_keeps_a_connection_in_use(server: EmbeddedServer) -> None:
    """Only silence is a reason for doubt."""
    async with (
        FaultProxy(server) as proxy,
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client, response_timeout=20) as sync,
    ):
        lock = sync.lock("slow")
        await (await lock.acquire()).release()
        proxy.on("EVALSHA", Action.delay_reply(2))
        await (await lock.acquire()).release()
        assert sync.connections == 1


FIRST, AGAIN = 11, 14
"""More than the replies until the answer to an acquire: of redis-py, and of the link; also when it connects again."""


@pytest.mark.parametrize("again", [False, True], ids=["the first", "a later one"])
async def test_any_reply_of_a_handshake_is_lost(server: EmbeddedServer, again: bool) -> None:
    """The next connection is tried after one `response_timeout`, whichever reply it was."""
    lost = await asyncio.gather(*[_without(server, number, again) for number in range(AGAIN if again else FIRST)])
    assert sum(lost) > (AGAIN if again else FIRST) - 4, "some are behind the last one of the handshake"


async def _without(server: EmbeddedServer, number: int, again: bool) -> bool:
    """Acquire although the reply of that number is lost; return whether there was one."""
    async with (
        FaultProxy(server) as proxy,
        Redis(host=proxy.host, port=proxy.port, socket_connect_timeout=20, socket_timeout=20) as client,
        Coordinator(client, response_timeout=1, retry_for=3.5) as sync,
    ):
        lock = sync.lock(f"swallowed:{again}:{number}")
        if again:
            await (await lock.acquire()).release()
            rule = proxy.on(anything, SWALLOW_REPLY, skip=number)
            await proxy.cut()
        else:
            rule = proxy.on(anything, SWALLOW_REPLY, skip=number)
        await (await lock.acquire()).release()
        return rule.acted == 1
