"""`inspect` shows the holders and the waiters, by reading alone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncRobustLock, Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.inspection import NameView, inspect
from redis_sync_aio.testing.faults import Action, FaultProxy
from tests.conftest import MakeClient
from tests.support.body import FAST
from tests.support.inside import Kind
from tests.support.inspecting import seen

HERE = socket.gethostname()[:32], os.getpid()
READS = {"SCAN", "TIME", "GET", "PTTL", "ZRANGE", "ZCARD", "ZRANGEBYSCORE", "ZSCORE", "HMGET", "HGET", "PUBSUB"}


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """End tasks that wait."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lock_shows_its_holder_and_its_waiters_in_order(
    redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """Host, pid, fence, times and the order of the queue, as the server has them."""
    lease = await sync.lock("orders:42", ttl=30).acquire()
    first = asyncio.create_task(other.lock("orders:42").acquire())
    await seen(redis, "orders:42", lambda it: len(it.waiters) == 1)
    second = asyncio.create_task(other.lock("orders:42").acquire(identity="worker-7"))
    view = await seen(redis, "orders:42", lambda it: len(it.waiters) == 2)
    (holder,) = view.holders
    assert (view.name, view.kind, view.held, view.limit, view.available) == ("orders:42", "lock", 1, 1, 0)
    assert view.problems == ()
    assert (holder.host, holder.pid) == HERE
    assert (holder.token, holder.fence, holder.identity) == (lease.token, lease.fence, None)
    assert holder.connected is True
    assert not holder.foreign
    assert holder.remaining is not None
    assert 0 < holder.remaining <= 30.1
    assert holder.held_for is not None
    assert holder.held_for >= 0
    one, two = view.waiters
    assert (one.host, one.pid) == HERE
    assert (two.token, two.identity, two.host) == ("worker-7", "worker-7", None)
    assert one.alive is two.alive is True
    assert not one.polls
    await cancelled(first, second)
    await lease.release()
    assert await inspect(redis, "orders:42") == ()
    (idle,) = await inspect(redis, "orders:42", idle=True)
    assert (idle.holders, idle.waiters, idle.idle, idle.fence) == ((), (), True, lease.fence)


async def test_each_kind_is_told_by_its_keys(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """The same name may be a lock, a semaphore and a read/write lock; names with a hash tag are found, too."""
    name = "of:{many}:kinds"
    async with (
        sync.lock(name),
        sync.semaphore(name, limit=5).acquire(weight=2),
        sync.read_write_lock(name).read(),
        AsyncRobustLock(sync, "of:robust"),
    ):
        waiting = asyncio.create_task(other.semaphore(name, limit=5).acquire(weight=4))
        writing = asyncio.create_task(other.read_write_lock(name).write().acquire())

        async def all_there() -> dict[Kind, NameView] | None:
            # Not by `waiting`: the queue is counted a moment after it is listed, and they queue up meanwhile.
            views = await inspect(redis, "of:*")
            there: dict[Kind, NameView] = {it.kind: it for it in views if it.waiters or it.kind in ("lock", "robust")}
            return there if len(there) == 4 else None

        found = await wait_until(all_there, FAST, timeout=20)
        assert found is not None
        assert {kind: it.name for kind, it in found.items()} == {
            "lock": name,
            "semaphore": name,
            "read_write": name,
            "robust": "of:robust",
        }
        semaphore, both = found["semaphore"], found["read_write"]
        assert (semaphore.limit, semaphore.held, semaphore.available) == (5, 2, 3)
        assert [(it.weight, it.access) for it in semaphore.holders] == [(2, None)]
        assert [it.weight for it in semaphore.waiters] == [4]
        assert (both.limit, both.held, both.available) == (None, 1, None)
        assert [(it.weight, it.access, it.held_for) for it in both.holders] == [(1, "read", None)]
        assert [(it.weight, it.access) for it in both.waiters] == [(1, "write")]
        await cancelled(waiting, writing)


async def test_only_names_that_match_are_shown_and_not_more_than_asked_for(redis: Redis, sync: Coordinator) -> None:
    """Patterns are those of Redis; what else is on the server is not taken for a lock."""
    await redis.mset({f"orders:{number}": "data" for number in range(100)})
    names = ["orders:1a", "orders:2a", "{orders:3a}x", "orders:[4]", "other"]
    leases = [await sync.lock(name).acquire() for name in names]

    async def found(pattern: str, **options: Any) -> list[str]:
        return [it.name for it in await inspect(redis, pattern, **options)]

    assert set(names) <= set(await found("*"))  # an earlier test may have left something
    assert await found("orders:*") == ["orders:1a", "orders:2a", "orders:[4]"]
    assert await found("orders:[12]?") == ["orders:1a", "orders:2a"]
    assert await found("orders:\\[4\\]") == ["orders:[4]"]
    assert await found("?rders:1?") == ["orders:1a"]
    assert len(await found("*", limit=2)) == 2
    for lease in leases:
        await lease.release()


@pytest.mark.real  # MONITOR
async def test_nothing_but_reads_is_sent(
    redis: Redis, make_client: MakeClient, sync: Coordinator, other: Coordinator
) -> None:
    """As MONITOR tells; so it works for a user that may not write, and needs no script on the server."""
    await redis.set("reads:foreign", "somebody")
    waiting = asyncio.create_task(other.lock("reads:foreign").acquire())
    async with sync.lock("reads:a"), sync.semaphore("reads:b", limit=2), sync.read_write_lock("reads:c").write():
        await seen(redis, "reads:foreign", lambda it: len(it.waiters) == 1)
        looker = make_client(max_connections=1)
        own = (await looker.client_info())["addr"]
        sent = set()
        async with make_client().monitor() as monitor:
            assert len(await inspect(looker, "reads:*", idle=True)) == 4
            assert len(await inspect(looker, "reads:foreign")) == 1
            await looker.echo("the end")
            while (command := await monitor.next_command())["command"] != "ECHO the end":
                if f"{command['client_address']}:{command['client_port']}" == own:
                    sent.add(command["command"].split()[0].upper())
        assert sent <= READS
        assert sent >= {"SCAN", "GET", "ZRANGE", "HMGET"}
    await cancelled(waiting)


async def test_tight_rights_are_enough_and_missing_ones_are_named(
    redis: Redis, make_client: MakeClient, sync: Coordinator
) -> None:
    """A user that may only read some keys sees those; what it may not see is a problem of that name."""
    words = ["on", ">secret", "~mine:*", "~{mine:*"]
    reads = [f"+{word.lower()}" for word in sorted(READS - {"PUBSUB"})]
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "looker", "reset", *words, *reads)
    looker = make_client(username="looker", password="secret")
    async with sync.lock("mine:tight"), sync.lock("yours:tight"):
        mine, yours = await inspect(looker, "*:tight")
        assert (mine.name, mine.problems, mine.held) == ("mine:tight", (), 1)
        assert mine.holders[0].connected is None  # it may not ask who listens
        assert [it.code for it in yours.problems] == ["unreadable"]
        await admin.execute_command("ACL", "SETUSER", "looker", "-scan")
        with pytest.raises(PermissionDenied, match=r"refused to show names: .*'scan'.*/operations/inspection/#rights"):
            await inspect(looker, "*:tight")
        (named,) = await inspect(looker, "mine:tight")
        assert named.held == 1
    await admin.execute_command("ACL", "DELUSER", "looker")


@pytest.mark.real  # counts the commands of the server
async def test_it_takes_few_commands_for_a_name(redis: Redis, sync: Coordinator) -> None:
    """Seven for a lock that is held, in batches: 10,000 names take a tenth of a second of the server's time."""
    held = [await sync.lock(f"n:{number}", ttl=600).acquire() for number in range(500)]
    await redis.config_resetstat()
    assert len(await inspect(redis, "n:*")) == 500
    calls = Counter({name: one["calls"] for name, one in (await redis.info("commandstats")).items()})
    reads = sum(calls[f"cmdstat_{name.lower()}"] for name in READS)
    assert 6 * 500 <= reads <= 7 * 500 + 100  # another coordinator may be at work
    for lease in held:
        await lease.release()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_every_way_to_connect_reads_the_same(
    redis: Redis, make_client: MakeClient, sync: Coordinator, protocol: int
) -> None:
    """RESP2 and RESP3; a client that decodes replies; a coordinator."""
    decoding = make_client(protocol=protocol, decode_responses=True)
    async with sync.lock("way:a"), sync.semaphore("way:b", limit=2).acquire(weight=2):
        tokens = [[it.holders[0].token for it in await inspect(source, "way:*")] for source in (redis, decoding, sync)]
        assert tokens[0] == tokens[1] == tokens[2]
        assert len(tokens[0]) == 2


async def test_a_server_that_is_away_is_an_error_of_this_package() -> None:
    """Unreachable names the address."""
    with EmbeddedServer(port=0) as away:
        address, client = f"{away.host}:{away.port}", away.client()
    with pytest.raises(Unreachable, match=address):
        await inspect(client, "*")
    await client.aclose()


@pytest.mark.real  # a server that ends
async def test_connections_that_a_restarted_server_has_closed_are_replaced() -> None:
    """Idle connections of the client's pool are of no use then, and no reason for an error."""
    with EmbeddedServer(port=0) as restarted:
        client = restarted.client()
        await asyncio.gather(*(client.ping() for _ in range(5)))
        await asyncio.to_thread(restarted.restart, keep_data=False)
        assert await inspect(client) == ()
        await client.aclose()


async def test_other_connections_of_the_client_stay_open(server: EmbeddedServer) -> None:
    """One that is of no use is replaced; the others of its pool are the caller's."""
    async with FaultProxy(server) as proxy, proxy.client() as looker:

        async def connections() -> set[int]:
            async with looker.client() as first, looker.client() as second, looker.client() as third:
                return {await it.client_id() for it in (first, second, third)}

        before = await connections()
        rule = proxy.on("TIME", Action.CUT_BEFORE)
        await inspect(looker)
        assert rule.fired.is_set()
        assert len(before) == 3
        assert len(before & await connections()) == 2


@pytest.mark.parametrize("pattern", ["orders:[", "orders:*[ab", r"orders:[a\]", "orders:*\\"])
async def test_a_pattern_without_an_end_is_refused(redis: Redis, pattern: str) -> None:
    """What a search appends to it would belong to the bracket, or to the backslash, so it would find nothing."""
    with pytest.raises(ValueError, match=r"the pattern '.*' has a .*: if that character belongs to the name"):
        await inspect(redis, pattern)


async def test_bad_arguments_are_refused(redis: Redis) -> None:
    """Before anything is sent."""
    with pytest.raises(ValueError, match="limit"):
        await inspect(redis, "*", limit=0)
    with pytest.raises(ValueError, match="shown"):
        await inspect(redis, "*", shown=0)
    with pytest.raises(TypeError, match="pattern"):
        await inspect(redis, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pattern"):
        await inspect(redis, "")
    with pytest.raises(TypeError, match="idle"):
        await inspect(redis, idle=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a client, not an address"):
        await inspect("redis://")  # type: ignore[arg-type]
