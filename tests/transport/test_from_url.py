"""A coordinator that is made from an address owns its client: it is closed with it. What its first use costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongContext
from redis_sync_aio.testing.servers import SentinelTopology

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.topologies import Nodes

NAMED = "from-url"
QUICK_START = """
import asyncio, sys
from redis_sync_aio import Coordinator

async def main():
    async with Coordinator.from_url(sys.argv[1]) as sync, sync.lock("orders:42"):
        print((await sync.client.get("orders:42")) is not None)

asyncio.run(main())
"""


async def none_left(redis: Redis) -> None:
    """Return once the server has no connection of ours; it may be slow to notice."""

    async def gone() -> bool:
        return all(one["name"] != NAMED for one in await redis.client_list())

    await wait_until(gone, FAST, timeout=10)


async def use(url: str, **options: Any) -> Coordinator:
    """Hold a lock, and use the client as well; return the coordinator, which is closed."""
    options = {"client_name": NAMED} | options
    async with Coordinator.from_url(url, client_options=options) as sync:
        async with sync.lock("from-url"):
            assert await sync.client.exists("from-url") == 1
        await asyncio.gather(*(sync.client.ping() for _ in range(5)))
    return sync


@pytest.mark.parametrize("way", ["tcp", pytest.param("unix", marks=pytest.mark.ci)])
def test_a_program_of_three_lines_ends_without_a_warning(server: EmbeddedServer, way: str) -> None:
    """What is not closed would warn, and a warning is an error here."""
    url = server.url if way == "tcp" else f"unix://{server.unix_socket}"
    command = [sys.executable, "-W", "error", "-c", QUICK_START, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


async def test_the_client_is_closed_with_the_coordinator(redis: Redis, server: EmbeddedServer) -> None:
    closed = await use(server.url)
    assert closed.why_closed is not None
    await none_left(redis)
    await closed.aclose()  # once more, as any close


async def test_the_client_is_closed_if_no_lock_was_used(redis: Redis, server: EmbeddedServer) -> None:
    """Also when the closing is cancelled: it goes on, and the cancellation comes out."""
    sync = Coordinator.from_url(server.url, client_options={"client_name": NAMED})
    await sync.client.ping()
    closing = asyncio.create_task(sync.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await none_left(redis)


async def test_the_client_of_the_caller_stays_open(redis: Redis, make_client: MakeClient) -> None:
    client = make_client(client_name=NAMED)
    async with Coordinator(client) as sync, sync.lock("from-url"):
        await client.ping()
    assert any(one["name"] == NAMED for one in await redis.client_list())


@pytest.mark.real
async def test_another_event_loop_closes_neither(server: EmbeddedServer) -> None:
    async with Coordinator.from_url(server.url) as sync:
        await sync.client.ping()
        with pytest.raises(WrongContext):
            await asyncio.to_thread(asyncio.run, sync.aclose())
        assert await sync.client.ping()
        async with sync.lock("from-url"):
            pass


async def test_options_are_those_of_a_coordinator(server: EmbeddedServer) -> None:
    url = server.url
    sync = Coordinator.from_url(url, push="never", client_options={"decode_responses": True})
    async with sync, sync.lock("from-url") as lease:
        assert await sync.client.get("from-url") == lease.token
    with pytest.raises(ValueError, match="push"):
        Coordinator.from_url(url, push="sometimes")  # type: ignore[arg-type]


async def test_a_cluster(nodes: Nodes) -> None:
    hosts = ",".join(f"{node.host}:{node.port}" for node in nodes.primaries)
    await use(f"redis+cluster://{hosts}")
    for node in nodes.primaries:
        async with node.client() as client:
            await none_left(client)


async def test_sentinel(group: SentinelTopology) -> None:
    """The clients of the sentinels are closed as well."""
    hosts = ",".join(f"{group.primary.host}:{port}" for port in group.ports)
    await use(f"redis+sentinel://{hosts}/{group.group}", sentinel_kwargs={"client_name": NAMED})
    for port in (group.primary.port, *group.ports):
        async with Redis(port=port or 0) as client:
            await none_left(client)


@pytest.mark.parametrize("url", ["redis://:secret@one,two", "localhost", "redis://one/secret"])
def test_an_address_that_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="redis") as caught:
        Coordinator.from_url(url)
    assert "secret" not in str(caught.value)


def test_an_address_is_text() -> None:
    with pytest.raises(TypeError, match="must be str"):
        Coordinator.from_url(b"redis://localhost")  # type: ignore[arg-type]


FIRST_USE = """
import asyncio, json, sys
from redis_sync_aio import Coordinator

read = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).endswith(".lua") and read.append(str(args[0])))

async def use(url, make):
    async with Coordinator.from_url(url) as sync:
        primitive = eval(make)
        before = list(read)
        async with primitive:
            pass
        print(json.dumps({"before": before, "read": read}))

asyncio.run(use(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("make", "scripts"),
    [
        ("sync.lock('x')", ["lock/acquire", "lock/release"]),
        pytest.param("sync.semaphore('x', limit=2)", ["permits/acquire", "permits/release"], marks=pytest.mark.ci),
    ],
    ids=["lock", "semaphore"],
)
def test_a_first_acquire_reads_the_scripts_that_it_sends(server: EmbeddedServer, make: str, scripts: list[str]) -> None:
    """Rendering all 29 scripts in the first acquire stalled the loop for 38 to 80 ms; two of them take 2."""
    command = [sys.executable, "-c", FIRST_USE, server.url, make]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = json.loads(done.stdout)
    read = ["/".join(path.removesuffix(".lua").split("/")[-2:]) for path in found["read"]]
    assert not found["before"]
    assert sorted(path for path in read if not path.startswith("include/")) == sorted(scripts)
    assert len(read) == len(set(read))  # each part once, whichever scripts include it
