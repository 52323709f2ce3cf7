"""What a user may not read is said to be unreadable. Nothing is concluded from its absence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import NameView, inspect

from ..conftest import MakeClient
from ..support.inspecting import seen
from ..support.pairwise import first_of
from ..support.programs import command

LOCK = ("~x", "~{x}:queue", "~{x}:fence", "~{x}:polls")
SEMAPHORE = ("~{s}:sem", "~{s}:sem:state", "~{s}:sem:queue", "~{s}:sem:polls")


@pytest_asyncio.fixture(autouse=True)
async def held(redis: Redis, sync: Coordinator) -> AsyncIterator[None]:
    """A lock and a semaphore that are held, and waited for by a process that polls."""
    async with (
        Coordinator(redis, push="never") as polling,
        sync.lock("x"),
        sync.semaphore("s", limit=2).acquire(weight=2),
    ):
        tasks = [
            asyncio.create_task(polling.lock("x").acquire()),
            asyncio.create_task(polling.semaphore("s", limit=2).acquire()),
        ]
        for name in "xs":
            await seen(redis, name, lambda it: it.waiting)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        admin: Any = redis
        await admin.execute_command("ACL", "DELUSER", "looker")


@pytest_asyncio.fixture
async def allow(redis: Redis) -> Any:
    """Give the user ``looker`` these rights only."""
    admin: Any = redis

    async def give(*rules: str) -> None:
        await admin.execute_command("ACL", "SETUSER", "looker", "reset", "on", ">secret", "+@all", *rules)

    return give


def unreadable(view: NameView) -> str:
    """Return what is said of a name of which nothing else is said."""
    assert [it.code for it in view.problems] == ["unreadable"]
    return view.problems[0].meaning.partition(":")[0]


HIDDEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "its fence": ("x", tuple(it for it in LOCK if "fence" not in it)),
    "its holder and the time left of its lease": ("x", LOCK[1:]),
    "its queue": ("x", tuple(it for it in LOCK if "queue" not in it)),
    "which of its waiters are alive": ("x", LOCK[:-1]),
    "the time left of its lease": ("x", (*LOCK, "-pttl")),
    "its holder and its fence": ("x", (*LOCK, "-get")),
    "its limit and fences": ("s", tuple(it for it in SEMAPHORE if "state" not in it)),
    "its holder": ("s", SEMAPHORE[1:]),
}


@pytest.mark.parametrize("what", first_of(*HIDDEN))
async def test_what_is_not_readable_is_the_only_problem(
    redis: Redis, make_client: MakeClient, allow: Any, what: str
) -> None:
    """It is not called gone, evicted, free, foreign or dead; the rest is as an administrator sees it."""
    name, rules = HIDDEN[what]
    await allow(*rules)
    kind = "lock" if name == "x" else "semaphore"
    looker = make_client(username="looker", password="secret")
    (view,), (full,) = [[it for it in await inspect(one, name) if it.kind == kind] for one in (looker, redis)]
    assert unreadable(view) == f"the server refused to show {what}"
    assert not any(it.foreign for it in view.holders)
    assert all(it.alive is not False for it in view.waiters)
    if "holder" in what:
        assert (view.holders, view.available) == ((), None)
    else:
        assert [it.token for it in view.holders] == [it.token for it in full.holders]
    if "queue" not in what:
        assert [it.token for it in view.waiters] == [it.token for it in full.waiters]


@pytest.mark.ci
async def test_show_says_what_is_known_and_what_is_not(server: EmbeddedServer, allow: Any) -> None:
    """A lock that is held is called held, though its fence is not readable; one that may be held is not called free."""

    async def shown(word: str, *rules: str) -> str:
        await allow(*rules)
        env = {"REDIS_USERNAME": "looker", "REDIS_PASSWORD": "secret", "REDIS_URL": server.url}
        return str((await asyncio.to_thread(command, word, "x", **env)).stdout)

    fence = await shown("show", *HIDDEN["its fence"][1])
    assert "\n  held\n" in fence
    assert "refused to show its fence: NOPERM" in fence
    assert "gone" not in fence
    assert "evicted" not in fence
    key = await shown("show", *LOCK[1:])
    assert "\n  not readable for this user\n" in key
    assert "free" not in key
    assert "\nx\tlock\t?\t" in await shown("ls", *LOCK[1:])
    left = await shown("show", *HIDDEN["the time left of its lease"][1])
    assert ", no ttl is known, " in left


async def test_a_fence_of_a_wrong_type_is_not_called_gone(redis: Redis) -> None:
    """That another program uses the key is said, and nothing else."""
    await redis.delete("{x}:fence")
    await redis.hset("{x}:fence", "a", "b")
    (view,) = await inspect(redis, "x")
    assert [it.code for it in view.problems] == ["wrong_type"]
