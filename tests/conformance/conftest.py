"""Every way to reach a server: what passes on one of them must pass on all.

With --topology=sentinel all clients find the server through sentinels. With --topology=shards the cluster of the way
"cluster" has three shards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from redis import Redis as SyncRedis
from redis.asyncio import RedisCluster
from redis.asyncio.sentinel import Sentinel

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Client

from ..conftest import SELDOM, MakeClient
from ..support.clusters import SLOTS, cluster
from ..support.factories import KINDS, LOCK, SHARED, WATCHED, Kind
from ..support.inside import tuned
from ..support.options import OPTIONS
from ..support.sentinels import GROUP, Group, sentinels
from ..support.virtual import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

T = TypeVar("T")

WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "link": ({}, {}),
    "link-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {}),
    "link-no-socket-timeout": ({"socket_timeout": None}, {}),
    "polling": ({}, {"push": "never"}),
    "polling-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {"push": "never"}),
    "cluster": ({}, {}),
}


WIDELY = ("link-no-socket-timeout", "polling-resp2-decoded", "cluster")
"""Ways that only the gate tries (--run-ci): the others show what a poll, decoding and RESP2 may change,
`faults/test_wire_time.py` what a socket timeout does, and `cluster/test_cluster.py` that clusters work."""

WAYS_OF = {"sentinel": ("link", "polling"), "shards": ("cluster",)}
"""What goes over another topology: the others differ in what it does not touch. Tests without a way use a link."""

SEMAPHORES_GO = ("link", "polling", "cluster")
"""The other ways differ in decoding only, which is the same code for all primitives: locks show that it works. Without
pushes nothing is shared."""


ABOVE_THE_ENGINE = ("test_exceptions", "test_contexts_", "test_loss")
"""What these are about happens in the process, whatever decides on the server: locks and semaphores by scripts show
that it works. With --run-ci they run on talks as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the ways that would show nothing new for what is not a lock; mark those for the gate alone."""
    items[:] = [item for item in items if not _shows_nothing_new(item)]
    for item in items:
        if _is_for_the_gate(item):
            item.add_marker(pytest.mark.ci)


def _chosen(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _is_for_the_gate(item: pytest.Item) -> bool:
    chosen = _chosen(item)
    above = chosen.get("kind") in WATCHED and item.path.name.startswith(ABOVE_THE_ENGINE)
    return above or (chosen.get("way") in WIDELY and OPTIONS.topology == "direct")


def _shows_nothing_new(item: pytest.Item) -> bool:
    chosen = _chosen(item)
    if OPTIONS.topology != "direct" and chosen.get("way", "link") not in WAYS_OF[OPTIONS.topology]:
        return True
    if chosen.get("share") and item.get_closest_marker("tickets"):
        return True
    kind = chosen.get("kind", LOCK)
    if not isinstance(kind, Kind):
        return False
    if kind.share and (chosen.get("way", "link") != "link" or item.get_closest_marker("tickets")):
        return True
    if kind.linger and item.get_closest_marker("asks_on_release"):
        return True
    return kind is not LOCK and chosen.get("way", "link") not in SEMAPHORES_GO


@pytest.fixture(params=KINDS + WATCHED + SHARED, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    """What is under test: it lets one in at a time."""
    found = request.param
    assert isinstance(found, Kind)
    return found


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How the locks under test reach the server."""
    return str(request.param)


@contextmanager
def in_a_loop_of_its_own(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter it, for fixtures of the session: each test has another loop."""
    loop = asyncio.new_event_loop()
    try:
        yield loop.run_until_complete(manager.__aenter__())
        loop.run_until_complete(manager.__aexit__(None, None, None))
    finally:
        loop.close()


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
    with in_a_loop_of_its_own(cluster(bounds=(0, *NAMED, SLOTS))) as nodes:
        yield nodes.primaries[1]


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A primary, a replica and three sentinels."""
    with in_a_loop_of_its_own(sentinels(tmp_path_factory.mktemp("sentinels"))) as found:
        yield found


@pytest.fixture
def server(request: pytest.FixtureRequest, server: EmbeddedServer) -> EmbeddedServer:
    """The server of all clients in a test."""
    chosen = getattr(request.node, "callspec", None)
    if OPTIONS.topology == "sentinel":
        group: Group = request.getfixturevalue("group")
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
    group: Group = request.getfixturevalue("group")
    made: list[Any] = []

    def make(**options: object) -> Any:
        found: Any = Sentinel([(server.host, port) for port in group.ports])  # type: ignore[no-untyped-call]
        client = found.master_for(GROUP, **options)
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
