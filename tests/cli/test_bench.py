"""`bench` measures what it says, and leaves nothing behind."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from redis_sync_aio.embedded import EmbeddedServer

from ..support.clusters import Nodes
from ..support.programs import command, printed_json

BRIEFLY = ("--seconds", "0.3", "--tasks", "3")


async def test_figures(server: EmbeddedServer, redis: Redis) -> None:
    await redis.set("mark", "before")
    figures = printed_json("bench", *BRIEFLY, "--url", server.url)
    assert figures["tasks"] == 3
    assert figures["alone_per_second"] > 0
    assert figures["together_per_second"] > 0
    # In milliseconds, and no median of what takes time is more than twice the mean.
    assert 0 < figures["alone_median"] <= 2 * 1000 / figures["alone_per_second"]
    assert figures["handovers"] == 0 or 0 < figures["handover_median"] <= figures["handover_p99"]
    assert await redis.keys() == [b"mark"]


def test_the_table_says_what_is_measured(server: EmbeddedServer) -> None:
    done = command("bench", *BRIEFLY, "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "acquire and release, one task" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.ci
def test_a_cluster(nodes: Nodes) -> None:
    url = f"redis+cluster://127.0.0.1:{nodes.primaries[0].port}"
    assert printed_json("bench", *BRIEFLY, "--url", url)["alone_per_second"] > 0
