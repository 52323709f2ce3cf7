"""Two versions side by side: a ticket that this version cannot read keeps its place, and its owner gets its turn."""

from __future__ import annotations

import asyncio
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

import redis_sync_aio
from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Engine

from ..support.inside import lock_keys, now, permit_keys

LATER = {
    "_engine/snapshot.py": [
        (r"([^|]*)\|(\d+)\|(\d+)\|(\d+)\|(.*)", r"([^|]*)\|(?:2;)?(\d+)\|(\d+)\|(\d+)\|(?:&\|)?(.*)"),
        ("%b|%d|%d|%d|%b", "%b|2;%d|%d|%d|&|%b"),
    ],
    "_scripts/constants.py": [
        ("^([^|]*)|(%d+)|(%d+)|(%d+)|(.*)$", "^([^|]*)|[2;]-(%d+)|(%d+)|(%d+)|&?|?(.*)$"),
        ("(%x+)|(%d+)|(%d+)|(%d+)|()", "(%x+)|[2;]-(%d+)|(%d+)|(%d+)|&?|?()"),
    ],
}
"""The source of a later version: its tickets have the number of a layout and one more field. It reads both layouts."""

WORKER = """
import asyncio, logging, sys
sys.path.insert(0, sys.argv.pop(1))
from redis.asyncio import Redis
from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator

async def use(redis, guard, most):
    for _ in range(20):
        async with guard.acquire(timeout=60):
            inside = await redis.incr("inside")
            await redis.rpush("turns", sys.path[0])
            await asyncio.sleep(0.002)
            await redis.decr("inside")
            assert inside <= most, "an overlap"

async def run(address, kind, push, engine):
    options = {"ttl": 10, "engine": engine}
    async with Redis.from_url(address) as redis, Coordinator(redis, push=push) as sync:
        if kind == "lock":
            guard, most = AsyncLock(sync, "x", **options), 1
        elif kind == "semaphore":
            guard, most = AsyncSemaphore(sync, "x", 2, **options), 2
        else:
            guard, most = AsyncReadWriteLock(sync, "x", ttl=10).write(), 1
        await guard.locked()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(use(redis, guard, most) for _ in range(4)))

logging.basicConfig(format="%(event)s", level=logging.WARNING)
asyncio.run(run(*sys.argv[1:]))
"""
"""A worker: four tasks that acquire a name twenty times each; its log goes to stderr."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of this version and of a later one."""
    here = Path(redis_sync_aio.__file__).parent
    later = tmp_path_factory.mktemp("later")
    shutil.copytree(here, later / here.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, changes in LATER.items():
        path = later / here.name / file
        text = path.read_text("utf-8")
        for before, after in changes:
            assert before in text, "the layout of tickets has changed: change the later one here, too"
            text = text.replace(before, after)
        path.write_text(text, "utf-8")
    return here.parent, later


async def worker(version: Path, *options: str) -> Process:
    """Return a worker of a version that is ready to begin."""
    command = sys.executable, "-c", WORKER, str(version), *options
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.real
@pytest.mark.ci
@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [("lock", "lua"), ("lock", "watch"), ("semaphore", "lua"), ("semaphore", "watch"), ("read_write", "lua")],
)
async def test_p1_p2_neither_version_starves(
    kind: str, push: str, engine: str, versions: tuple[Path, Path], server: EmbeddedServer
) -> None:
    """All of their tasks get their turns, and the older version says once that it met a later one."""
    workers = [await worker(version, server.url, kind, push, engine) for version in versions]
    ends = await asyncio.gather(*(process.communicate(b"go\n") for process in workers))
    older, later = (errors.decode() for _, errors in ends)
    assert [process.returncode for process in workers] == [0, 0], older + later
    assert (older.split(), later.split()) == (["later_layout"], [])
    with Redis.from_url(server.url, decode_responses=True) as redis:
        first_half = Counter(redis.lrange("turns", 0, 79))
    assert len(first_half) == 2
    assert min(first_half.values()) >= 20, first_half


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p2_a_later_version_that_hangs_keeps_out_no_other(
    kind: str, engine: Engine, redis: AsyncRedis, sync: Coordinator
) -> None:
    """It is told that it is its turn, and has as long as a claim to take it."""
    primitive: AsyncLock | AsyncSemaphore
    if kind == "lock":
        primitive, queue = AsyncLock(sync, "x", ttl=30, engine=engine), lock_keys(b"x").queue
    else:
        primitive, queue = AsyncSemaphore(sync, "x", 1, ttl=30, engine=engine), permit_keys(b"x", "sem").all[2]
    async with redis.pubsub() as inbox:
        await inbox.subscribe("rsa:feed")
        assert await inbox.get_message(timeout=5)
        async with primitive:
            await redis.zadd(queue, {"rsa:feed|2;7|a new form": 1})
        released = now()
        assert await primitive.try_acquire() is None
        async with primitive.acquire(timeout=60):
            assert 4.5 <= now() - released < 9
        told = await inbox.get_message(timeout=5)
        assert told is not None
        assert told["data"].startswith(b"7 -1 ")
