"""P1, P3, P12, FAULTS C6, C7: one connection takes another one's place."""

from __future__ import annotations

import asyncio
import sys

import pytest

from redis_sync_aio import AsyncLock, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.factories import WATCHED_LOCK, Client
from ..support.inside import Link, hub_of
from ..support.proxy import CUT_BEFORE, HOLD, HOLD_REPLY, command
from ..support.wired import SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop


async def reconnected(w: Wired) -> None:
    opened = w.sync.connections
    await w.proxy.cut()
    await wait_until(lambda: w.sync.connections > opened, SOON, timeout=15)


@pytest.mark.parametrize("lives", [False, True, "elsewhere", "longer"])
async def test_only_our_own_old_connection_is_killed(
    server: EmbeddedServer, make_client: MakeClient, lives: bool | str
) -> None:
    """After a restart its id is somebody else's; after a failover, too. Who hears all channels is not taken for it."""
    async with wired(server) as w:
        monitor = make_client().pubsub()
        await monitor.psubscribe("*")
        stranger = make_client(single_connection_client=True)
        await stranger.initialize()
        link = hub_of(w.sync).link
        assert isinstance(link, Link)
        lease = await w.lock().acquire()
        if lives:
            inbox = make_client(client_name="old").pubsub()
            await inbox.subscribe(link._handshake.inbox)  # stands for the old connection
            await inbox.get_message(timeout=5)
            (known,) = [int(one["id"]) for one in await w.direct.client_list() if one["name"] == "old"]
        else:
            known = await stranger.client_id()
        newest = link._handshake._newest
        assert newest is not None
        link._handshake._newest = ("elsewhere", 1) if lives == "elsewhere" else newest[0], known
        if lives == "longer":  # the first connection that would kill it is cut before
            w.proxy.on("PUBSUB", CUT_BEFORE)
        await reconnected(w)
        assert link.alone is (lives != "elsewhere")

        async def gone() -> bool:
            return known not in [int(one["id"]) for one in await w.direct.client_list()]

        assert await gone() is (lives in (True, "longer"))
        await w.check_held(lease)
        await lease.release()
        await monitor.aclose()  # type: ignore[no-untyped-call]


async def test_p1_p6_by_watch_the_time_of_a_talk_is_its_own(server: EmbeddedServer) -> None:
    """A conflict's pause that outlasts its connection does not touch what was begun again on the next one."""
    async with wired(server, kind=WATCHED_LOCK) as w:
        fence = w.kind.keys(w.name).all[2]
        for _ in range(12):
            await (await w.lock(ttl=5).acquire()).release()
            acquiring = asyncio.create_task(w.lock(ttl=5, auto_renew=False).acquire())
            for _ in range(8):  # until the pause is at its longest
                rule = w.proxy.on(command("EXEC"), HOLD, times=1)
                await rule.fired.wait()
                await w.direct.set(fence, await w.direct.get(fence) or b"")
                rule.release.set()
            await asyncio.sleep(0.001)
            await w.proxy.cut()
            slow = w.proxy.on(command("EXEC"), HOLD_REPLY, skip=1, times=1)  # the first: a proof
            await slow.fired.wait()
            await asyncio.sleep(0.03)
            slow.release.set()
            lease = await acquiring
            left = await w.direct.pttl(w.name) / 1000
            assert lease.remaining() <= left + 0.001
            await lease.release()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
async def test_p12_eager_tasks(make_client: MakeClient) -> None:
    """A connection that fails immediately, in an eager task, is tried again."""
    client = make_client()
    pool: Client = client.connection_pool
    make = pool.make_connection
    loop = asyncio.get_running_loop()

    def failing() -> None:
        pool.make_connection = make
        raise RuntimeError("no credentials yet")

    async with Coordinator(client, retry_for=5) as sync:
        hub_of(sync).check()
        pool.make_connection = failing
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        try:
            async with asyncio.timeout(5), AsyncLock(sync, "eager"):
                pass
        finally:
            loop.set_task_factory(None)
