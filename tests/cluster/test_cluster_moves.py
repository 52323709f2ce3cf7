"""FAULTS D7: slots of a Redis Cluster move."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import RedisCluster

from redis_sync_aio import AsyncLock, AsyncSemaphore, CommandRefused, Coordinator, Unreachable, transaction, wait_until
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.clusters import SHARDS, Nodes, cluster, enough, learn_of_moves, moved_back, processes
from ..support.inside import Call, Engine, LinkEvents, cluster_link_of, hub_of, lock_keys, now
from ..support.pairwise import first_of

pytestmark = pytest.mark.timing
NEVER = 300.0
"""Seconds until a waiter would look again by itself."""


@pytest.mark.parametrize("way", first_of("link", "polling", "shared", "in one step"))
async def test_p1_p2_p8_d7_contention_while_the_slot_moves(nodes: Nodes, way: str) -> None:
    """It goes round, and back: nobody is let in next to another, fences rise, nobody is left behind."""
    if way == "in one step" and not await nodes.can_move_at_once():
        pytest.skip("this server moves slots key by key only")
    name = nodes.name_at(0, f"moving-{way}")
    slot, (a, b, c) = nodes.slot(name), nodes.primaries
    share = way == "shared"
    grants: list[int] = []
    inside, over = 0, False

    async def work(sync: Coordinator) -> None:
        nonlocal inside
        while not over:
            async with AsyncLock(sync, name, ttl=10, share=share).acquire(timeout=60) as lease:
                inside += 1
                assert inside == 1
                grants.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

    async with moved_back(nodes, name), processes(nodes, push="never" if way == "polling" else "auto") as both:
        tasks = [asyncio.create_task(work(sync)) for sync in both for _ in range(3)]
        for source, target in ((a, b), (b, c), (c, a)):
            await goes_on(grants)
            await (nodes.move_at_once if way == "in one step" else nodes.move)(slot, source, target)
        await goes_on(grants)
        over = True
        await asyncio.gather(*tasks)
        assert grants == sorted(set(grants))
        assert not await AsyncLock(both[0], name).locked()


async def goes_on(grants: list[int], count: int = 5) -> None:
    """Return after so many grants more."""
    wanted = len(grants) + count
    await wait_until(lambda: enough(grants, wanted), FAST, timeout=60)


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
        await lease.release()  # by the node that has it now, which finds nobody of them listening
        other = await lock(holds).try_acquire()
        assert other is not None
        await wait_until(waits(lock(holds), 2), FAST, timeout=15)  # they were told to ask again
        assert not any(waiter.done() for waiter in waiters)
        await other.release()
        for waiter in waiters:
            await (await asyncio.wait_for(waiter, 15)).release()


async def test_p4_p5_a_slot_on_its_way(nodes: Nodes) -> None:
    """A release and an acquire wait for the slot, within their time; what is cancelled leaves nothing."""
    name = nodes.name_at(1, "on-its-way")
    slot, (_, b, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = AsyncLock(sync, name)
        lease = await lock.acquire()
        await nodes.begin_move(slot, b, c)
        with pytest.raises(CommandRefused, match="TRYAGAIN"):
            await AsyncLock(other, name).acquire(timeout=1)
        cancelled = asyncio.create_task(AsyncLock(other, name).acquire())
        link = cluster_link_of(other).link_of(lock_keys(name.encode()))
        await wait_until(lambda: enough(link._deferred.delayed, 1), FAST, timeout=15)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        releasing = asyncio.create_task(lease.release())
        waiting = asyncio.create_task(AsyncLock(other, name).acquire())
        await wait_until(lambda: enough(link._deferred.delayed, 1), FAST, timeout=15)
        assert not releasing.done()
        assert not waiting.done()
        await nodes.end_move(slot, b, c)
        await asyncio.wait_for(releasing, 15)
        await (await asyncio.wait_for(waiting, 15)).release()

        async def nothing_left() -> bool:
            return not any([await nodes.say(c, "EXISTS", key) for key in (name, f"{{{name}}}:queue")])

        await wait_until(nothing_left, FAST, timeout=15)
        async with AsyncLock(other, name).acquire(timeout=5):
            pass


async def test_p6_a_lease_is_renewed_where_its_slot_is(nodes: Nodes) -> None:
    name = nodes.name_at(2, "renewed")
    slot, (a, _, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, _), AsyncLock(sync, name, ttl=2) as lease:
        await nodes.move(slot, c, a)
        for _ in range(2):
            before = lease._grant.deadline

            async def renewed(before: float = before) -> bool:
                return lease._grant.deadline > before

            await wait_until(renewed, FAST, timeout=15)
        assert await nodes.say(a, "GET", name) == lease.token.encode()


async def test_transactions_follow_the_slot(nodes: Nodes) -> None:
    key = nodes.name_at(0, "followed")
    slot, (a, b, _) = nodes.slot(key), nodes.primaries

    async def add(tx: Transaction) -> int:
        count = int(await tx.get(key) or 0) + 1
        tx.multi()
        tx.set(key, count)
        return count

    async with moved_back(nodes, key), nodes.client() as client:
        assert (await transaction(client, add, key)).value == 1
        await nodes.move(slot, a, b)
        assert (await transaction(client, add, key)).value == 2
        async with AsyncLock(client, f"{{{key}}}:lock") as lease:
            await nodes.move(slot, b, a)
            async with lease.transaction() as tx:
                count = int(await tx.get(key) or 0)
                tx.multi()
                tx.set(key, count + 1)
        assert await nodes.say(a, "GET", key) == b"3"


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
                await nodes.say(a, "CLIENT", "PAUSE", 60_000, "WRITE")
            first = send(b"first")
            if state == "refused":
                await wait_until(lambda: refused(first), FAST, timeout=15)
            else:
                await asyncio.sleep(0)  # it is written in this turn of the loop
            await nodes.say(b, "CLUSTER", "BUMPEPOCH")  # first: else what the old node has said before takes it back
            for node in (b, c):
                await nodes.say(node, "CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[b])
            known = await learn_of_moves(client, f"{b.host}:{b.port}")
            shard = known.shard_at(slot)
            assert shard.address is not None
            assert shard.address.port == b.port
            send(b"second")
            async with sync.lock(nodes.name_at(1)):  # the new node has answered what was sent behind
                # A node that has refused hears sooner or later what the other nodes say, and answers MOVED then.
                assert answers == [] or (state == "refused" and slot not in await nodes.slots(a))
        finally:
            if state == "moving":
                a.resume()
            elif state == "moved":
                await nodes.say(a, "CLIENT", "UNPAUSE")
        send(b"third")
        await wait_until(lambda: enough(answers, 3), FAST, timeout=15)
        assert answers == [b"first", b"second", b"third"]
        send(b"fourth")
        assert not cluster_link_of(sync)._left
        await wait_until(lambda: enough(answers, 4), FAST, timeout=10)


async def refused(call: Call) -> bool:
    return call.connection_error is not None


@pytest.mark.parametrize("share", [False, True])
async def test_p3_a_waiter_follows_the_slot(nodes: Nodes, share: bool) -> None:
    """Once its process knows: then it is handed over by a push, as before."""
    name = nodes.name_at(0, f"follows{share:d}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes, poll_cap=NEVER) as (sync, other):
        lock = AsyncLock(sync, name)
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, share=share).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await nodes.move(slot, a, b)
        assert isinstance(other.client, RedisCluster)
        await learn_of_moves(other.client, f"{b.host}:{b.port}")
        inbox = hub_of(other).endpoint_of(lock_keys(name.encode())).inbox

        async def stands_there_now() -> bool:
            tickets = await nodes.say(b, "ZRANGE", f"{{{name}}}:queue", 0, -1)
            return bool(tickets) and all(ticket.startswith(inbox + b"|") for ticket in tickets)

        await wait_until(stands_there_now, FAST, timeout=15)
        before = (await nodes.say(b, "INFO", "commandstats"))["cmdstat_evalsha"]["calls"]
        await lease.release()
        granted = await asyncio.wait_for(waiter, 15)
        assert (await nodes.say(b, "INFO", "commandstats"))["cmdstat_evalsha"]["calls"] <= before + 2
        await granted.release()


@pytest.mark.parametrize("mode", ["auto", "never"])
async def test_p3_a_node_that_is_cut_off_is_not_asked_forever(mode: str) -> None:
    """It says that the cluster is down, and the others say who has the slot now."""
    async with (
        cluster(debug=True) as nodes,
        nodes.client() as client,
        Coordinator(client, push=mode) as sync,  # type: ignore[arg-type]
    ):
        name = nodes.name_at(0)
        slot, (a, b, c) = nodes.slot(name), nodes.primaries
        async with sync.lock(name):
            pass
        await nodes.isolate(a)
        await nodes.say(b, "CLUSTER", "BUMPEPOCH")
        for node in (b, c):
            await nodes.say(node, "CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[b])
        await nodes.say(a, "CLUSTER", "DELSLOTS", slot)
        async with sync.lock(name).acquire(timeout=30):
            assert await nodes.say(b, "EXISTS", name) == 1

        async def write(tx: Transaction) -> None:
            await tx.get(f"{{{name}}}:x")
            tx.multi()
            tx.set(f"{{{name}}}:x", 1)

        await transaction(client, write, f"{{{name}}}:x", timeout=30)


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
        Coordinator(nodes.client()) as other,
    ):
        lease = await sync.lock(name).acquire()
        await nodes.move(slot, a, b)
        broken = True
        with pytest.raises(CommandRefused, match="TRYAGAIN"):
            await lease.extend(10)
        with pytest.raises(Unreachable, match="KeyError: 'no such host'"):
            await sync.lock(nodes.name_at(2)).acquire()
        broken = False

        async def extended() -> bool:
            try:
                await lease.extend(10)
            except CommandRefused:  # a busy machine may need longer than retry_for
                return False
            return True

        await wait_until(extended, FAST, timeout=15)
        await lease.release()
        assert not await other.lock(name).locked()
        await other.client.aclose()
    assert "does not learn where the slots are: KeyError('no such host')" in caplog.text
    assert "Fatal error" not in caplog.text
    assert "never retrieved" not in caplog.text


async def test_p9_a_grant_is_heard_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what is published at one node is heard at all of them, and a process listens at each."""
    heard: list[bytes] = []
    pushed = LinkEvents.link_pushed

    def noted(events: LinkEvents, payload: bytes) -> None:
        heard.append(payload)
        pushed(events, payload)

    monkeypatch.setattr(LinkEvents, "link_pushed", noted)
    async with processes(nodes) as (sync, other):
        for shard in range(SHARDS):
            async with other.lock(nodes.name_at(shard)):
                pass
        lock = AsyncLock(sync, nodes.name_at(0, "once"))
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, nodes.name_at(0, "once")).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await lease.release()
        granted = await waiter
        for _ in range(2):
            for shard in range(SHARDS):  # behind what was heard there
                await other.lock(nodes.name_at(shard)).locked()
        assert len(heard) == 1
        await granted.release()
