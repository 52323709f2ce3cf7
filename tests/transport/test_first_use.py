"""What the first use of a coordinator costs the event loop: it renders the scripts it sends, and no others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from redis_sync_aio.embedded import EmbeddedServer

PROGRAM = """
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
        ("sync.semaphore('x', limit=2)", ["permits/acquire", "permits/release"]),
    ],
    ids=["lock", "semaphore"],
)
def test_a_first_acquire_reads_the_scripts_that_it_sends(server: EmbeddedServer, make: str, scripts: list[str]) -> None:
    """Rendering all 29 scripts in the first acquire stalled the loop for 38 to 80 ms; two of them take 2."""
    command = [sys.executable, "-c", PROGRAM, server.url, make]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = json.loads(done.stdout)
    read = ["/".join(path.removesuffix(".lua").split("/")[-2:]) for path in found["read"]]
    assert not found["before"]
    assert sorted(path for path in read if not path.startswith("include/")) == sorted(scripts)
    assert len(read) == len(set(read))  # each part once, whichever scripts include it
