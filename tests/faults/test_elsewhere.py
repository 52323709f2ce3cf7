"""P1, P6: the old server lives on and takes writes, while its clients would connect to another one now."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, LeaseLost, transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SentinelTopology
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.inside import now
from ..support.topologies import PATIENT

NOTICED = 20.0
"""Seconds in which a process moves, on a busy machine; it takes 1.3. Sentinel demotes the old primary after about 8."""


async def still_primary(server: EmbeddedServer) -> None:
    """See that the old primary would take our writes still; on a very slow machine Sentinel has demoted it."""
    if await role(server) != "master":
        pytest.skip("the machine is too busy: Sentinel was sooner")


async def role(server: EmbeddedServer) -> str:
    async with server.client() as client:
        found: Any = await client.role()
        return str(found[0].decode() if isinstance(found[0], bytes) else found[0])


@pytest.mark.real
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_p1_p6_a_planned_failover_by_sentinel_is_noticed(push: Any) -> None:
    """The holder renews at the new primary, and hands over there, long before the old one is demoted."""
    async with (
        SentinelTopology(down_after=PATIENT) as group,
        group.client() as client,
        group.client() as other,
        Coordinator(client, push=push) as sync,
        Coordinator(other, push=push) as elsewhere,
    ):
        lock = sync.lock("planned", ttl=30)
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(elsewhere, "planned", ttl=30).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await group.fail_over()
        switched = now()

        async with group.replica.client() as new:

            async def renewed_there() -> bool:
                return int(await new.pttl("planned")) > 30_000 - 1000 * (now() - switched) / 2

            await wait_until(renewed_there, FAST, timeout=NOTICED)
        await still_primary(group.primary)
        lease.check()
        assert not waiter.done()
        await lease.release()
        following = await asyncio.wait_for(waiter, 20)  # polls again within 2.5 s
        assert following.fence > lease.fence
        async with group.replica.client() as new:
            assert await new.get("planned") == following.token.encode()
        await following.release()
        await still_primary(group.primary)


@pytest.mark.real
async def test_p1_p6_what_the_old_primary_grants_meanwhile_ends_soon() -> None:
    """A process has an idle connection and is granted a lock there. Once it moves it learns that another one has it."""
    async with SentinelTopology(down_after=PATIENT) as group, group.client() as client, Coordinator(client) as sync:
        async with sync.lock("other"):
            pass
        await group.fail_over()
        old = await sync.lock("both", ttl=20).acquire()
        async with group.primary.client() as admin:
            if not await admin.exists("both"):
                pytest.skip("the machine is too busy: the process has noticed before")
        async with group.client() as other, Coordinator(other) as elsewhere:
            new = await elsewhere.lock("both", ttl=20).acquire()
            await asyncio.wait_for(old.wait_lost(), NOTICED)
            await still_primary(group.primary)
            assert new.fence > old.fence
            new.check()
            with pytest.raises(LeaseLost):
                old.check()
            await new.release()


@pytest.mark.real
async def test_a_transaction_does_not_use_a_pooled_connection_to_the_old_primary() -> None:
    """One was in use when Sentinel named the new primary, so redis-py did not close it with the idle ones."""
    async with SentinelTopology(down_after=PATIENT) as group, group.client() as client, Coordinator(client) as sync:
        async with sync.lock("held"):  # so somebody asks Sentinel
            pool: Any = client.connection_pool
            connection = await pool.get_connection()
            await group.fail_over()

            async def known() -> bool:
                return bool(pool.master_address[1] == group.replica.port)

            await wait_until(known, FAST, timeout=NOTICED)
            await pool.release(connection)

            async def write(tx: Transaction) -> None:
                await tx.get("written")
                tx.multi()
                tx.set("written", 1)

            await transaction(client, write, "written")
        async with group.replica.client() as new:
            assert await new.get("written") == b"1"
        await still_primary(group.primary)


async def test_p6_a_host_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease moves to the server that the name is pointed at, and a name whose addresses take turns is left alone."""
    addresses = ["127.0.0.1"]
    resolve = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **options: Any) -> Any:
        if host != "locks.example":
            return resolve(host, *args, **options)
        return [found for address in addresses for found in resolve(address, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    async with (
        EmbeddedServer(port=0) as first,
        EmbeddedServer(port=first.port, args=("--bind", "127.0.0.2")),
        first.client() as admin,
        Redis(host="locks.example", port=first.port or 0) as client,
        Redis(host="locks.example", port=first.port or 0) as other,
        Coordinator(client) as pushed,
        Coordinator(other, push="never") as polling,
    ):
        locks = [sync.lock(f"pointed {push}", ttl=3) for sync, push in ((pushed, "auto"), (polling, "never"))]
        leases = [await lock.acquire() for lock in locks]

        async def renewals(count: int) -> None:
            for _ in range(count):
                before = [lease._grant.deadline for lease in leases]

                async def renewed(before: list[float] = before) -> bool:
                    return all(lease._grant.deadline > one for lease, one in zip(leases, before, strict=True))

                await wait_until(renewed, FAST, timeout=15)

        await renewals(1)
        addresses[:] = ["127.0.0.3", "127.0.0.1"]  # one more
        await renewals(2)
        before = (await admin.info("stats"))["total_connections_received"]
        for one in ("127.0.0.3", "127.0.0.1"):  # that the name has had before
            addresses[:] = [one]
            await renewals(2)
        assert (await admin.info("stats"))["total_connections_received"] == before
        addresses[:] = ["127.0.0.2"]
        async with asyncio.timeout(NOTICED), asyncio.TaskGroup() as tasks:  # nothing was replicated to that one
            for lease in leases:
                tasks.create_task(lease.wait_lost())
        for lock in locks:
            async with lock, Redis(host="127.0.0.2", port=first.port or 0) as there:
                assert await there.exists(lock.name) == 1
