"""FAULTS D7: slots of a Redis Cluster move. What is published at one node arrives at the others in real time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import RedisCluster

from redis_sync_aio import AsyncLock, AsyncSemaphore, CommandRefused, Coordinator, Unreachable, transaction, wait_until
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.inside import (
    Call,
    ClusterNodes,
    Engine,
    LinkEvents,
    NodeAddress,
    Range,
    cluster_link_of,
    hub_of,
    lock_keys,
    now,
)
from ..support.pairwise import first_of
from ..support.topologies import SHARDS, Nodes, enough, learn_of_moves, moved_back, processes

NEVER = 300.0
"""Seconds until a waiter would look again by itself."""


@pytest.mark.real
@pytest.mark.parametrize("way", first_of("link", "polling", "shared", "in one step"))
async def test_p1_p2_p8_contention_while_the_slot_moves(nodes: Nodes, way: str) -> None:
    """It goes round, and back: one holder at a time, fences rise, each waiter has its turn."""
    if way == "in one step" and not await nodes.can_move_at_once():
        pytest.skip("this server moves slots key by key only")
    name = nodes.name_at(0, f"moving-{way}")
    slot, (a, b, c) = nodes.slot(name), nodes.primaries
    grants: list[int] = []
    inside, ended = 0, False

    async def work(sync: Coordinator) -> None:
        nonlocal inside
        while not ended:
            async with AsyncLock(sync, name, ttl=10, share=way == "shared").acquire(timeout=60) as lease:
                inside += 1
                assert inside == 1
                grants.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

    async def five_more() -> None:
        wanted = len(grants) + 5
        await wait_until(lambda: enough(grants, wanted), FAST, timeout=60)

    async with moved_back(nodes, name), processes(nodes, push="never" if way == "polling" else "auto") as both:
        tasks = [asyncio.create_task(work(sync)) for sync in both for _ in range(3)]
        for source, target in ((a, b), (b, c), (c, a)):
            await five_more()
            await (nodes.move_at_once if way == "in one step" else nodes.move)(slot, source, target)
        await five_more()
        ended = True
        await asyncio.gather(*tasks)
        assert grants == sorted(set(grants))
        assert not await AsyncLock(both[0], name).locked()


@pytest.mark.real
@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p1_p3_a_waiter_at_the_old_node_does_not_take_a_grant_of_the_new_one(
    nodes: Nodes, kind: str, engine: Engine
) -> None:
    """What is published at one node is heard at all. A waiter does not know yet that the slot has moved (P3: asks)."""
    name = nodes.name_at(0, f"broadcast-{kind}-{engine}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries

    def lock(sync: Coordinator) -> AsyncLock | AsyncSemaphore:
        if kind == "lock":
            return AsyncLock(sync, name, ttl=60, engine=engine)
        return AsyncSemaphore(sync, name, limit=1, ttl=60, engine=engine)

    async with moved_back(nodes, name), processes(nodes, poll_cap=NEVER) as (holds, waiting):
        lease = await lock(holds).acquire()
        waiters = [asyncio.create_task(lock(waiting).acquire()) for _ in range(2)]
        await wait_until(waits(lock(holds), 2), FAST, timeout=15)
        await nodes.move(slot, a, b)
        await lease.release()  # by the node that has it now, where none of them listens
        other = await lock(holds).try_acquire()
        assert other is not None
        await wait_until(waits(lock(holds), 2), FAST, timeout=15)  # they were told to ask again
        assert not any(waiter.done() for waiter in waiters)
        await other.release()
        for waiter in waiters:
            await (await asyncio.wait_for(waiter, 15)).release()


@pytest.mark.real
@pytest.mark.parametrize("share", [False, True])
async def test_p3_p9_a_waiter_follows_the_slot(nodes: Nodes, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its process knows: it is handed over by one push, which only one of its connections takes."""
    name = nodes.name_at(0, f"follows{share:d}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    heard: list[bytes] = []
    pushed = LinkEvents.link_pushed

    def noted(events: LinkEvents, payload: bytes) -> None:
        heard.append(payload)
        pushed(events, payload)

    async with moved_back(nodes, name), processes(nodes, poll_cap=NEVER) as (sync, other):
        for shard in range(SHARDS):  # it listens at each
            async with other.lock(nodes.name_at(shard)):
                pass
        lock = AsyncLock(sync, name)
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, share=share).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await nodes.move(slot, a, b)
        assert isinstance(other.client, RedisCluster)
        await learn_of_moves(other.client, f"{b.host}:{b.port}")
        inbox = hub_of(other).endpoint_of(lock_keys(name.encode())).inbox

        async def stands_there_now() -> bool:
            tickets = await nodes.call(b, "ZRANGE", f"{{{name}}}:queue", 0, -1)
            return bool(tickets) and all(ticket.startswith(inbox + b"|") for ticket in tickets)

        await wait_until(stands_there_now, FAST, timeout=15)
        monkeypatch.setattr(LinkEvents, "link_pushed", noted)
        before = (await nodes.call(b, "INFO", "commandstats"))["cmdstat_evalsha"]["calls"]
        await lease.release()
        granted = await asyncio.wait_for(waiter, 15)
        assert (await nodes.call(b, "INFO", "commandstats"))["cmdstat_evalsha"]["calls"] <= before + 2
        for shard in (*range(SHARDS), *range(SHARDS)):  # behind what was heard there
            await other.lock(nodes.name_at(shard)).locked()
        assert len(heard) == 1
        await granted.release()


async def test_p6_p8_leases_and_transactions_follow_the_slot(nodes: Nodes) -> None:
    """A lease is renewed where its slot is, and its transactions go there."""
    key = nodes.name_at(0, "followed")
    name = f"{{{key}}}:lock"
    slot, (a, b, _) = nodes.slot(key), nodes.primaries

    async def add(tx: Transaction) -> None:
        count = int(await tx.get(key) or 0) + 1
        tx.multi()
        tx.set(key, count)

    async with moved_back(nodes, key), nodes.client() as client:
        await transaction(client, add, key)
        await nodes.move(slot, a, b)
        await transaction(client, add, key)
        async with AsyncLock(client, name, ttl=6) as lease:
            await nodes.move(slot, b, a)
            async with lease.transaction() as tx:
                await add(tx)
            for _ in range(2):
                await wait_until(lambda: lease.remaining() < 4.5, FAST, timeout=15)  # it is renewed at 4
                await wait_until(lambda: lease.remaining() > 4.5, FAST, timeout=15)
            assert await nodes.call(a, "GET", name) == lease.token.encode()
        assert await nodes.call(a, "GET", key) == b"3"


@pytest.mark.real
@pytest.mark.parametrize("state", ["moving", "refused", "moved"])
async def test_p4_a_call_stays_behind_what_the_old_node_has_of_its_name(nodes: Nodes, state: str) -> None:
    """The slot moves while a call is at the old node: without an answer, refused for now, or not looked at yet."""
    name = nodes.name_at(0, f"behind-{state[0]}")
    slot, (a, b, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), nodes.client() as client, Coordinator(client, response_timeout=60) as sync:
        for at in (name, nodes.name_at(1)):  # both connections are there
            async with sync.lock(at):
                pass
        answers: list[bytes] = []

        def send(token: bytes) -> Call:
            def noted(call: Call) -> None:
                assert call.error is None
                answers.append(token)

            sent = now()
            call = Call(sent, sent + 120, noted)
            keys = lock_keys(name.encode())
            hub_of(sync).commands.acquire(keys, token, call, ttl_ms=9, ticket=b"", poll_ms=0, more=(0,))
            return call

        try:
            if state == "moving":
                a.pause()
            elif state == "refused":
                await nodes.begin_move(slot, a, b)
            else:
                # It still hears of what the other nodes say.
                await nodes.call(a, "CLIENT", "PAUSE", 60_000, "WRITE")
            first = send(b"first")
            if state == "refused":
                await wait_until(lambda: first.connection_error, FAST, timeout=15)
            else:
                await asyncio.sleep(0)  # it is written in this turn of the loop
            await nodes.call(b, "CLUSTER", "BUMPEPOCH")  # first: else what the old node has said before takes it back
            for node in (b, c):
                await nodes.call(node, "CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[b])
            known = await learn_of_moves(client, f"{b.host}:{b.port}")
            shard = known.shard_at(slot)
            assert shard.address is not None
            assert shard.address.port == b.port
            send(b"second")
            async with sync.lock(nodes.name_at(1)):  # the new node has answered what was sent behind
                # A refused call has left the old node: its next try goes to the new one, and the second call behind it.
                assert answers == [] or (state == "refused" and answers == [b"first", b"second"][: len(answers)])
        finally:
            if state == "moving":
                a.resume()
            elif state == "moved":
                await nodes.call(a, "CLIENT", "UNPAUSE")
        send(b"third")
        await wait_until(lambda: enough(answers, 3), FAST, timeout=15)
        assert answers == [b"first", b"second", b"third"]
        send(b"fourth")
        assert not cluster_link_of(sync)._left
        await wait_until(lambda: enough(answers, 4), FAST, timeout=10)


@pytest.mark.real
@pytest.mark.parametrize("mode", ["auto", pytest.param("never", marks=pytest.mark.ci)])
async def test_p3_a_node_that_is_cut_off_is_not_asked_forever(mode: Any) -> None:
    """It says that the cluster is down, and the others say who has the slot now."""
    async with Nodes(isolation=True) as nodes, nodes.client() as client, Coordinator(client, push=mode) as sync:
        name = nodes.name_at(0)
        slot, (a, b, c) = nodes.slot(name), nodes.primaries
        async with sync.lock(name):
            pass
        await nodes.isolate(a)
        await nodes.call(b, "CLUSTER", "BUMPEPOCH")
        for node in (b, c):
            await nodes.call(node, "CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[b])
        await nodes.call(a, "CLUSTER", "DELSLOTS", slot)
        async with sync.lock(name).acquire(timeout=30):
            assert await nodes.call(b, "EXISTS", name) == 1
        await transaction(client, written(f"{{{name}}}:x"), f"{{{name}}}:x", timeout=30)


def written(key: str) -> Any:
    """Return a body that writes a key."""

    async def write(tx: Transaction) -> None:
        await tx.get(key)
        tx.multi()
        tx.set(key, 1)

    return write


async def test_p12_address_remap_raises(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """While a slot moves: nothing is lost by that, and it is told if it lasts."""
    name = nodes.name_at(0, "remapped")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    broken = False

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        if broken:
            raise KeyError("no such host")
        return address

    async with (
        moved_back(nodes, name),
        nodes.client(address_remap=remap) as client,
        Coordinator(client, retry_for=0.5) as sync,
        nodes.client() as elsewhere,
        Coordinator(elsewhere) as other,
    ):
        lease = await sync.lock(name).acquire()
        await nodes.move(slot, a, b)
        broken = True
        with pytest.raises(CommandRefused, match="TRYAGAIN"):
            await lease.extend(10)
        with pytest.raises(Unreachable, match="KeyError: 'no such host'"):
            await sync.lock(nodes.name_at(2)).acquire()
        broken = False
        await lease.extend(10)
        await lease.release()
        assert not await other.lock(name).locked()
    assert "cannot find out which shard has which slots: KeyError('no such host')" in caplog.text
    assert "Fatal error" not in caplog.text
    assert "never retrieved" not in caplog.text


# -- which node is asked where the slots are -----------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports of the nodes that are asked where the slots are."""
    ports: list[int] = []
    ask = ClusterNodes.ask

    async def noted(known: ClusterNodes, node: NodeAddress) -> list[Range]:
        ports.append(node.port)
        return await ask(known, node)

    monkeypatch.setattr(ClusterNodes, "ask", noted)
    return ports


WAYS: dict[str, Any] = {"link": "auto", "polling": "never", "transaction": "auto"}


async def use(sync: Coordinator, way: str, name: str) -> None:
    if way == "transaction":
        await transaction(sync, written(name), name, timeout=10)
    else:
        async with sync.lock(name).acquire(timeout=10):
            pass


@pytest.mark.parametrize("way", first_of(*WAYS))
async def test_after_moved_the_node_that_it_names_is_asked(nodes: Nodes, asked: list[int], way: str) -> None:
    """It took the slot over, so it knows; what the others say may be old."""
    name = nodes.name_at(0, "told")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), nodes.client() as client, Coordinator(client, push=WAYS[way]) as sync:
        await use(sync, way, name)
        for source, target in ((a, b), (b, a)) * 3:  # in turn any other order would ask another one sooner or later
            await nodes.move(slot, source, target)
            asked.clear()
            await use(sync, way, name)
            assert asked[:1] == [target.port], (asked, [node.port for node in nodes.primaries])


@pytest.mark.ci
@pytest.mark.real
@pytest.mark.parametrize("way", WAYS)
async def test_after_clusterdown_another_node_is_asked(asked: list[int], way: str) -> None:
    """The one that says so may be cut off: it would say that nothing has changed."""
    async with Nodes() as nodes, nodes.client() as client, Coordinator(client, push=WAYS[way]) as sync:
        a, b, c = nodes.primaries
        names = [name for n in range(100) if nodes.owner(name := f"down{n}") is a][:4]
        for name in names:
            await use(sync, way, name)
        await nodes.call(b, "CLUSTER", "BUMPEPOCH")
        first: list[int] = []
        for name in names:  # each immediately, before the others tell it who has the slot
            for node in (b, c):
                await nodes.call(node, "CLUSTER", "SETSLOT", nodes.slot(name), "NODE", nodes.ids[b])
            await nodes.call(a, "CLUSTER", "DELSLOTS", nodes.slot(name))
            asked.clear()
            await use(sync, way, name)
            first += asked[:1]
        assert first, "it said CLUSTERDOWN"  # unless the client heard of a move while it asked about the one before
        assert a.port not in first, (first, [node.port for node in nodes.primaries])
