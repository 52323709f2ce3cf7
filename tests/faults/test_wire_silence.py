"""P3, P12, FAULTS C3, C4, D3: a connection is silent, a reply of a handshake is lost, many calls are in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from redis_sync_aio import Coordinator, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, anything, command

from ..support.inside import now
from ..support.routing import RoutingProxy
from ..support.topologies import EVEN, SHARDS, Nodes
from ..support.virtual import stall
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
            proxy.on(anything, Action.SWALLOW_REQUEST, times=1)
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


async def test_a_stall_of_the_loop_is_no_silence_of_the_server(server: EmbeddedServer) -> None:
    """What arrives right after it is soon enough."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, retry_for=60) as sync:
        lock = sync.lock("stalled")
        await (await lock.acquire()).release()
        answer = proxy.on("EVALSHA", Action.HOLD_REPLY)
        acquiring = asyncio.create_task(lock.acquire())
        await answer.fired.wait()
        stall(20)
        asyncio.get_running_loop().call_later(0.5, answer.release.set)
        await (await acquiring).release()
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
            rule = proxy.on(anything, Action.SWALLOW_REPLY, skip=number)
            await proxy.cut()
        else:
            rule = proxy.on(anything, Action.SWALLOW_REPLY, skip=number)
        await (await lock.acquire()).release()
        return rule.acted == 1


# -- P3, P12: thousands of commands in flight when something happens to all of them.


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
            await nodes.call(node, "SCRIPT", "FLUSH")
        sent.clear()
        await asyncio.gather(*[lease.release() for lease in leases])
        assert max(sent.values()) <= 3


@pytest.mark.real
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
