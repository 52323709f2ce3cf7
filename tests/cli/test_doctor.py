"""The doctor tells each fault by a line of its own, and writes nothing to the server."""

from __future__ import annotations

import pytest

from redis_sync_aio.embedded import EmbeddedServer

from ..support.programs import command, printed_json

CODES = {"warn": 1, "bad": 2}


def told(url: str, level: str, check: str) -> str:
    """Return what the doctor says about ``check``: one finding of that level, that has a meaning and a remedy."""
    report = printed_json("doctor", "--url", url, expect=[code for code in (1, 2) if code >= CODES[level]])
    (finding,) = [one for one in report["findings"] if one["check"] == check and one["level"] == level]
    assert finding["meaning"].endswith(".")
    assert finding["fix"]
    return str(finding["found"])


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_eviction(policy: str) -> None:
    with EmbeddedServer(port=0, args=["--maxmemory-policy", policy, "--maxmemory", "100mb"]) as server:
        assert told(server.url, "bad", "eviction") == f"maxmemory-policy is {policy}"


def test_eviction_that_is_configured_but_cannot_happen_yet() -> None:
    with EmbeddedServer(port=0, args=["--maxmemory-policy", "allkeys-lru"]) as server:
        assert told(server.url, "warn", "eviction") == "maxmemory-policy is allkeys-lru, but there is no maxmemory"


async def test_a_replica() -> None:
    with EmbeddedServer(port=0) as primary, EmbeddedServer(port=0) as replica:
        async with replica.client() as client:
            await client.replicaof(primary.host, primary.port)
        assert told(replica.url, "bad", "role") == f"this server is a replica of 127.0.0.1:{primary.port}"


def test_text_is_one_line_for_each_finding(server: EmbeddedServer) -> None:
    done = command("doctor", "--url", server.url)
    for line in done.stdout.splitlines():
        level, check = line.split(maxsplit=1)
        assert level in ("ok", "unknown", "warn", "bad")
        assert check.split(":")[0]
