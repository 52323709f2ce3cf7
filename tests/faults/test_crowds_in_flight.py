"""P3, P12: thousands of commands in flight when something happens to all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from redis_sync_aio import Coordinator, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action

from ..support.clusters import EVEN, SHARDS, Nodes
from ..support.proxy import FaultProxy, command
from ..support.routing import RoutingProxy
from ..support.wired import quiet_loop as quiet_loop


async def test_one_call_brings_a_forgotten_script_for_all(server: EmbeddedServer, redis: Redis) -> None:
    """SCRIPT FLUSH, or a restart: the source is sent once, not with each call in flight."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client) as sync:
        leases = [await sync.lock(f"forgotten:{number}").acquire() for number in range(300)]
        await redis.script_flush()
        known = proxy.commands["EVAL"]
        await asyncio.gather(*[lease.release() for lease in leases])
        assert proxy.commands["EVAL"] == known + 1
        assert not await redis.keys("forgotten:*[0-9]")


async def test_each_server_behind_a_proxy_gets_a_forgotten_script(nodes: Nodes) -> None:
    """What one call has brought to one server is not known to the others; each call is sent three times at most."""
    sent: dict[bytes, int] = {}

    def route(words: list[bytes]) -> int:
        if words[0] in (b"EVAL", b"EVALSHA") and words[2] != b"0":
            sent[words[3]] = sent.get(words[3], 0) + 1
            return next(number for number in range(SHARDS) if key_slot(words[3]) < EVEN[number + 1])
        return 0

    async with (
        RoutingProxy(nodes.primaries, route) as proxy,
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client) as sync,
    ):
        leases = [await sync.lock(f"n{number}").acquire() for number in range(60)]
        for node in nodes.primaries:
            await nodes.say(node, "SCRIPT", "FLUSH")
        sent.clear()
        await asyncio.gather(*[lease.release() for lease in leases])
        assert max(sent.values()) <= 3


async def test_expired_calls_do_not_hold_up_the_loop(server: EmbeddedServer) -> None:
    """They fail a few at a time, and other tasks run in between."""
    number, failed, at_most = 6000, 0, 0
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=1, response_timeout=60) as sync,
    ):
        await sync.lock("up").locked()
        proxy.black_hole = True

        async def ask(name: str) -> None:
            nonlocal failed
            with pytest.raises(Unreachable):
                await sync.lock(name).locked()
            failed += 1

        async with asyncio.TaskGroup() as group:
            for one in range(number):
                group.create_task(ask(f"n{one}"))
            while failed < number:
                before = failed
                await asyncio.sleep(0)
                at_most = max(at_most, failed - before)
        proxy.black_hole = False
    assert at_most < number / 4


async def test_calls_in_flight_do_not_expire_while_replies_come(server: EmbeddedServer) -> None:
    """They wait behind others, whom the server answers in order: nothing is unreachable."""
    options: dict[str, Any] = {"retry_for": 1, "response_timeout": 60}
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, **options) as sync:
        await sync.lock("up").locked()
        proxy.on(command("EVALSHA"), Action.delay_reply(0.05), times=None)
        await asyncio.gather(*[sync.lock(f"n{number}").locked() for number in range(60)])
