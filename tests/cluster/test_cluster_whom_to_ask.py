"""FAULTS D7, D8: which node of a cluster is asked first where the slots are, after MOVED and after CLUSTERDOWN."""

from __future__ import annotations

import pytest

from redis_sync_aio import Coordinator, transaction
from redis_sync_aio.types import Transaction

from ..support.clusters import Nodes, cluster, moved_back
from ..support.inside import ClusterNodes, NodeAddress, Range
from ..support.pairwise import first_of


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


async def use(sync: Coordinator, way: str, name: str) -> None:
    if way == "transaction":

        async def write(tx: Transaction) -> None:
            await tx.get(name)
            tx.multi()
            tx.set(name, 1)

        await transaction(sync, write, name, timeout=10)
    else:
        async with sync.lock(name).acquire(timeout=10):
            pass


WAYS = {"link": "auto", "polling": "never", "transaction": "auto"}
ways = pytest.mark.parametrize("way", first_of(*WAYS))


@ways
async def test_after_moved_the_node_that_it_names_is_asked(nodes: Nodes, asked: list[int], way: str) -> None:
    """It took the slot over, so it knows; what the others say may be old."""
    name = nodes.name_at(0, "told")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), nodes.client() as client, Coordinator(client, push=WAYS[way]) as sync:  # type: ignore[arg-type]
        await use(sync, way, name)
        for source, target in ((a, b), (b, a)) * 3:  # in turn any other order would ask another one sooner or later
            await nodes.move(slot, source, target)
            asked.clear()
            await use(sync, way, name)
            assert asked[:1] == [target.port], (asked, [node.port for node in nodes.primaries])


@ways
async def test_after_clusterdown_another_node_is_asked(asked: list[int], way: str) -> None:
    """The one that says so may be cut off: it would say that nothing has changed."""
    async with cluster() as nodes, nodes.client() as client, Coordinator(client, push=WAYS[way]) as sync:  # type: ignore[arg-type]
        a, b, c = nodes.primaries
        names = [name for n in range(100) if nodes.owner(name := f"down{n}") is a][:4]
        for name in names:
            await use(sync, way, name)
        await nodes.say(b, "CLUSTER", "BUMPEPOCH")
        first: list[int] = []
        for name in names:  # each immediately, before the others tell it who has the slot
            for node in (b, c):
                await nodes.say(node, "CLUSTER", "SETSLOT", nodes.slot(name), "NODE", nodes.ids[b])
            await nodes.say(a, "CLUSTER", "DELSLOTS", nodes.slot(name))
            asked.clear()
            await use(sync, way, name)
            first += asked[:1]
        assert first, "it said CLUSTERDOWN"  # unless the client heard of a move while it asked about the one before
        assert a.port not in first, (first, [node.port for node in nodes.primaries])
