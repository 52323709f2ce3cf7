"""Every way to reach a server: what passes on one of them must pass on all.

With --topology=sentinel all clients find the server through sentinels. With --topology=shards the cluster of the way
"cluster" has three shards.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis as SyncRedis
from redis.asyncio import RedisCluster
from redis.asyncio.sentinel import Sentinel

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SLOTS, SentinelTopology
from redis_sync_aio.types import Client

from ..conftest import SELDOM, MakeClient
from ..support.inside import tuned
from ..support.options import OPTIONS
from ..support.primitives import KINDS, LOCK, SHARED, WATCHED, Primitive
from ..support.topologies import PATIENT, Nodes
from ..support.virtual import ToServer

WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # options of the client, and of the coordinator
    "link": ({}, {}),
    "link-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {}),
    "link-no-socket-timeout": ({"socket_timeout": None}, {}),
    "polling": ({}, {"push": "never"}),
    "polling-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {"push": "never"}),
    "cluster": ({}, {}),
}
"""Those that differ in decoding and timeouts are for tests that name them: `transport/test_modes.py` shows them all."""

WAYS_OF = {"sentinel": ("link", "polling"), "shards": ("cluster",)}
"""What runs over another topology: the others differ in what it does not touch. Tests without a way use a link."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect combinations that prove nothing: see `_proves_nothing`."""
    out = {item for item in items if _proves_nothing(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def _proves_nothing(item: pytest.Item) -> bool:
    """True if an item is not for this topology, or shares where the test or its way lets nothing be shared.

    A process that shares queues one request for all its tasks: a test marked ``tickets`` is about a request for each.
    A lock that lingers asks nothing when it is released: a test marked ``asks_on_release`` is about the answer.
    """
    callspec = getattr(item, "callspec", None)
    chosen: dict[str, Any] = {} if callspec is None else callspec.params
    way, kind = chosen.get("way", "link"), chosen.get("kind", LOCK)
    if OPTIONS.topology != "direct" and way not in WAYS_OF[OPTIONS.topology]:
        return True
    shares = chosen.get("share") or (isinstance(kind, Primitive) and kind.share)
    if shares and (way != "link" or item.get_closest_marker("tickets")):
        return True
    return isinstance(kind, Primitive) and kind.linger > 0 and item.get_closest_marker("asks_on_release") is not None


@pytest.fixture(params=[*KINDS, *SHARED, *(pytest.param(it, marks=pytest.mark.ci) for it in WATCHED)], ids=str)
def kind(request: pytest.FixtureRequest) -> Primitive:
    """What is under test: it lets one in at a time. `engine` shows that WATCH decides as scripts do."""
    found = request.param
    assert isinstance(found, Primitive)
    return found


@pytest.fixture(params=["link", "polling", pytest.param("cluster", marks=pytest.mark.ci)])
def way(request: pytest.FixtureRequest) -> str:
    """How the locks under test reach the server: see `WAYS`."""
    return str(request.param)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collect what is written to servers in virtual time; each write is one packet, as a rule."""
    found: list[bytes] = []
    write = ToServer.write

    def collected(socket: ToServer, data: bytes | bytearray | memoryview) -> None:
        found.append(bytes(data))
        write(socket, data)

    monkeypatch.setattr(ToServer, "write", collected)
    return found


@pytest.fixture(scope="session")
def only_node() -> Iterator[EmbeddedServer]:
    """A cluster of one node, which any client can use as a server."""
    with EmbeddedServer(port=0, args=("--cluster-enabled", "yes")) as node, SyncRedis(port=node.port or 0) as client:
        plain: Any = client
        plain.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS))
        while b"cluster_state:ok" not in plain.execute_command("CLUSTER", "INFO"):
            time.sleep(0.01)
        yield node


NAMED = (500, 15700)
"""From and to where the slots of the names in tests are, so that clients of that one shard can look behind."""


@pytest.fixture(scope="session")
def main_shard() -> Iterator[EmbeddedServer]:
    """One of three shards, which has the slots of all names in tests."""
    with Nodes(bounds=(0, *NAMED, SLOTS)) as nodes:
        yield nodes.primaries[1]


@pytest.fixture(scope="session")
def group() -> Iterator[SentinelTopology]:
    """A primary, a replica and three sentinels."""
    with SentinelTopology(down_after=PATIENT) as found:
        yield found


@pytest.fixture
def server(request: pytest.FixtureRequest, server: EmbeddedServer) -> EmbeddedServer:
    """The server of all clients in a test."""
    chosen = getattr(request.node, "callspec", None)
    if OPTIONS.topology == "sentinel":
        group: SentinelTopology = request.getfixturevalue("group")
        return group.primary
    if chosen is None or chosen.params.get("way") != "cluster":
        return server
    node = request.getfixturevalue("main_shard" if OPTIONS.topology == "shards" else "only_node")
    assert isinstance(node, EmbeddedServer)
    return node


@pytest_asyncio.fixture
async def make_client(
    request: pytest.FixtureRequest, make_client: MakeClient, server: EmbeddedServer
) -> AsyncIterator[MakeClient]:
    """Build clients of the server, or of the primary that sentinels name; they are closed after the test."""
    if OPTIONS.topology != "sentinel":
        yield make_client
        return
    group: SentinelTopology = request.getfixturevalue("group")
    made: list[Any] = []

    def make(**options: object) -> Any:
        found: Any = Sentinel([(server.host, port) for port in group.ports])  # type: ignore[no-untyped-call]
        client = found.master_for(group.group, **options)
        made.extend([client, *found.sentinels])
        return client

    yield make
    for client in made:
        await client.aclose()


@pytest_asyncio.fixture
async def client(make_client: MakeClient, server: EmbeddedServer, way: str) -> AsyncIterator[Client]:
    """A client of that kind; the database is empty."""
    made = make_client(**WAYS[way][0])
    await made.flushall()
    if way != "cluster":
        yield made
        return
    async with RedisCluster(host=server.host, port=server.port or 0) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def sync(client: Client, way: str) -> AsyncIterator[Coordinator]:
    """A coordinator of that kind."""
    async with tuned(client, poll_cap=SELDOM, **WAYS[way][1]) as coordinator:
        yield coordinator
