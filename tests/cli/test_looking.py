"""``ls``, ``show`` and ``release``: what operators see of locks, and how they end what got stuck."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer
from tests.support.inspecting import seen

from ..support.pairwise import first_of
from ..support.programs import command, printed_json
from .terminals import terminal

pytestmark = pytest.mark.real

STYLE = re.compile(r"\x1b\[[0-9;]*m")


async def ran(*words: str, **more: str) -> Any:
    """Run a command while the event loop goes on."""
    return await asyncio.to_thread(command, *words, **more)


async def ran_json(*words: str, **options: Any) -> Any:
    """Run a command with --json while the event loop goes on."""
    return await asyncio.to_thread(lambda: printed_json(*words, **options))


@asynccontextmanager
async def a_user(redis: Redis, *rules: str) -> AsyncIterator[dict[str, str]]:
    """Create a user with these rights, and yield the environment of a command that connects as it."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", *rules)
    try:
        yield {"REDIS_USERNAME": "few", "REDIS_PASSWORD": "secret"}
    finally:
        await admin.execute_command("ACL", "DELUSER", "few")


async def test_ls_and_show_tell_holder_and_waiters(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """As text for a pipe, and as JSON."""
    async with sync.lock("look:orders"), sync.semaphore("look:slots", limit=3).acquire(weight=2):
        waiting = asyncio.create_task(other.lock("look:orders").acquire())
        await seen(redis, "look:orders", lambda it: len(it.waiters) == 1)
        url = ("--url", server.url)
        listed = await ran("ls", "look:*", *url)
        lines = [line.split("\t") for line in listed.stdout.splitlines()]
        assert [(one[0], one[1], one[5]) for one in lines] == [
            ("look:orders", "lock", "1"),
            ("look:slots", "semaphore", "0"),
        ]
        assert lines[0][2].endswith(f":{os.getpid()}")
        assert (await ran("ls", "look:s*", *url)).stdout.count("\n") == 1
        names = await ran_json("ls", "look:*", "-n", "1", *url)
        assert (len(names["names"]), names["more"]) == (1, True)
        assert (await ran_json("ls", "look:*", "-n", "2", *url))["more"] is False
        shown = await ran("show", "look:orders", *url)
        assert shown.returncode == 0
        assert f":{os.getpid()}, for " in shown.stdout
        assert "waiting: 1" in shown.stdout
        found = (await ran_json("show", "look:slots", *url))["names"]
        assert [(it["kind"], it["held"], it["available"]) for it in found] == [("semaphore", 2, 1)]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    unknown = await ran("show", "never", *url)
    assert (unknown.returncode, unknown.stdout) == (1, "nothing is known of 'never'\n")


async def test_release_ends_the_lease_and_wakes_the_next(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """The waiter is granted, with a higher fence; the former holder learns that its lease is lost."""
    lease = await sync.lock("x").acquire()
    waiting = asyncio.create_task(other.lock("x").acquire())
    await seen(redis, "x", lambda it: len(it.waiters) == 1)
    done = await ran("release", "x", "--yes", "--url", server.url)
    said = f"released: {socket.gethostname()}:{os.getpid()}, fence {lease.fence}\n"
    assert (done.returncode, done.stdout) == (0, said)
    granted = await waiting
    assert granted.fence > lease.fence
    with pytest.raises(LeaseLost):
        await lease.extend(30)
    await granted.release()


@pytest.mark.ci
async def test_a_token_chooses_one_permit(server: EmbeddedServer, sync: Coordinator, other: Coordinator) -> None:
    """Without a choice nothing is done; the other holder keeps its permit."""
    semaphore = AsyncSemaphore(sync, "x", limit=2)
    kept, ended = await semaphore.acquire(), await AsyncSemaphore(other, "x", limit=2).acquire()
    url = ("--url", server.url)
    unclear = await ran("release", "x", "--yes", *url)
    assert unclear.returncode == 2
    assert "choose by --token" in unclear.stderr
    wrong = await ran("release", "x", "--token", "nobody", "--yes", *url)
    assert wrong.returncode == 1
    done = await ran_json("release", "x", "--token", ended.token, "--yes", *url)
    assert done["released"] == [ended.token]
    assert [it.token for it in (await semaphore.statistics()).holders] == [kept.token]
    nobody = await ran_json("release", "x", "--host", "elsewhere", "--yes", *url, expect=[1])
    assert nobody["released"] == []
    await kept.release()


@pytest.mark.ci
async def test_a_job_is_listed_shown_and_forgotten(server: EmbeddedServer, redis: Redis, sync: Coordinator) -> None:
    """By its name; after that it runs again."""
    url = ("--url", server.url)
    async with sync.once("job", slot="a:b") as lease:
        assert lease is not None
    with pytest.raises(ZeroDivisionError):
        async with sync.once("job", slot="c", on_crash="skip"):
            raise ZeroDivisionError
    assert (await ran("ls", "job:*", *url)).stdout == ""
    lines = [line.split("\t") for line in (await ran("ls", "--all", "job:*", *url)).stdout.splitlines()]
    assert [(one[0], one[2], float(one[4]) > 80_000) for one in lines] == [
        ("job:a%3Ab", "done", True),
        ("job:c", "failed", True),
    ]
    shown = await ran("show", "job:c", *url)
    assert "job: failed (an earlier run raised, was cancelled or was killed), for 24h more" in shown.stdout
    (found,) = (await ran_json("show", "job:c", *url))["names"]
    assert found["mark"]["state"] == "failed"

    asked = await ran("forget", "job:c", *url)
    assert (asked.returncode, "pass --yes" in asked.stderr) == (2, True)
    forgotten = await ran("forget", "job", "--slot", "a:b", "--yes", *url)
    assert forgotten.stdout == "forgotten: 'job:a%3Ab' was done, for 24h more\n"
    assert (await ran_json("forget", "job:c", "--yes", *url))["forgotten"] == "failed"
    again = await ran("forget", "job:c", "--yes", *url)
    assert (again.returncode, again.stdout) == (1, "nothing is known of a job 'job:c'\n")
    for slot in ("a:b", "c"):
        async with sync.once("job", slot=slot) as lease:
            assert lease is not None


async def test_an_event_is_waited_for_and_never_held(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """Why its waiters wait is said. One that was let in, and has not said so yet, is not in the way of `release`."""
    url = ("--url", server.url)
    waiting = asyncio.create_task(other.event("go").wait())
    await seen(redis, "go", lambda it: len(it.waiters) == 1)
    shown = (await ran("show", "go", *url)).stdout
    assert "go  event at " in shown
    assert "it has not been set" in shown
    assert "waiting: 1" in shown
    assert "free" not in shown
    lease = await sync.lock("go", ttl=3600).acquire()

    async def set_it() -> None:
        async with server.client() as client, Coordinator(client) as third:
            await third.event("go").set()

    # The loop of the waiter stands still until the lock of the same name is released.
    thread = threading.Thread(target=lambda: asyncio.run(set_it()))
    thread.start()
    thread.join()
    done = command("release", "go", "--yes", *url)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "released")
    await waiting
    with pytest.raises(LeaseLost):
        await lease.extend(30)
    shown = (await ran("show", "go", *url)).stdout
    assert "no request waits for it" in shown


VALUES = {
    "a token": b"batch-7",
    "what a shell would expand": b"it's $HOME; `ls`",
    "like an option": b"--force",
    "what a terminal would obey": b"a\x1b[31m\n",
    "bytes that are no text": b"\xff\xfe\x80",
    "text that looks like such bytes": b"\\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("value", first_of(*VALUES.values()))
async def test_the_advised_command_releases_another_programs_lock(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, value: bytes
) -> None:
    """As `show` prints it: without that choice nothing is changed; with it the waiter gets the lock."""
    await redis.set("-x", value)
    waiting = asyncio.create_task(sync.lock("-x").acquire())
    await seen(redis, "-x", lambda it: len(it.waiters) == 1)
    refused = await ran("release", "--yes", "--url", server.url, "--", "-x")
    assert refused.returncode == 2
    assert await redis.get("-x") == value
    shown = (await ran("show", "--url", server.url, "--", "-x")).stdout
    advised = shlex.split(shown[shown.index("redis-sync-aio release") :].splitlines()[0])
    done = await ran(*advised[1:2], "--yes", *advised[2:], REDIS_URL=server.url)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "released"), done.stderr
    await (await waiting).release()


@pytest.mark.ci
async def test_a_long_or_empty_value_of_another_program(server: EmbeddedServer, redis: Redis) -> None:
    """A long one is not repeated in the advice. An empty one is no token, which is said, and is not called a bug."""
    await redis.set("x", "y" * 300)
    shown = (await ran("show", "x", "--url", server.url)).stdout
    assert shown.endswith("redis-sync-aio release x --token TOKEN (redis-sync-aio show prints the token)\n")
    await redis.set("x", "")
    done = await ran("release", "x", "--token", "", "--yes", "--url", server.url)
    assert done.returncode == 2
    assert done.stderr.endswith("use --force\n")
    assert await redis.get("x") == b""


async def test_a_kind_that_nobody_holds_is_named(server: EmbeddedServer, redis: Redis, sync: Coordinator) -> None:
    """A lock that is held is not called held by nobody; a kind that there is not is wrong usage."""
    url = ("--url", server.url)
    async with sync.lock("x") as lease:
        for kind, words in (("semaphore", "a semaphore"), ("read_write", "a read/write lock")):
            done = await ran("release", "x", "--kind", kind, "--yes", *url)
            assert (done.returncode, done.stdout) == (1, f"'x' has no holder as {words}\n")
        assert await redis.get("x") == lease.token.encode()


async def test_a_terminal_gets_a_table_of_80_columns(server: EmbeddedServer, redis: Redis, sync: Coordinator) -> None:
    """Long names keep their end; problems are spelled out; nothing of a name is obeyed by the terminal.

    A semaphore that is paused is called so, also while requests wait, which is no problem of it.
    """
    await redis.set("evil\x1b[31m", "data")
    slots = sync.semaphore("slots", limit=None)
    await slots.resize(0)
    long = "a-very-long-name:" * 9 + "42"
    waiting = [asyncio.create_task(sync.lock("evil\x1b[31m").acquire()), asyncio.create_task(slots.acquire())]
    async with sync.lock(long):
        for name in ("evil\x1b[31m", "slots"):
            await seen(redis, name, lambda it: len(it.waiters) == 1)
        with terminal("ls", "--url", server.url, NO_COLOR="1") as it:
            assert await asyncio.to_thread(it.end) == 0
            assert max(len(STYLE.sub("", line)) for line in it.screen.splitlines()) <= 80
            assert "long-name:42" in it.screen
            assert "no ttl" in it.screen
            assert "0/0 paused" in it.screen
            assert "\x1b[31m" not in it.screen
            assert it.is_sane()
    assert "paused (limit 0), 0 permits are held" in (await ran("show", "slots", "--url", server.url)).stdout
    (found,) = (await ran_json("show", "slots", "--url", server.url))["names"]
    assert (found["limit"], found["available"], found["problems"]) == (0, 0, [])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


ANSWERS = [("n\n", 1), ("\n", 1), ("\x03", 130), ("\x04", 130), ("maybe\ny\n", 0)]
"""Keys, and the exit code: an empty line means no; the end of the input is taken as Ctrl-C."""


@pytest.mark.parametrize("answer", first_of(*ANSWERS), ids=ascii)
async def test_release_asks_first(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, answer: tuple[str, int]
) -> None:
    """What will happen is said; without a yes nothing is changed; where nobody can answer, --yes is needed."""
    keys, code = answer
    lease = await sync.lock("x").acquire()
    piped = await ran("release", "x", "--url", server.url)
    assert piped.returncode == 2
    assert "--yes" in piped.stderr
    with terminal("release", "x", "--url", server.url) as it:
        await asyncio.to_thread(it.shows, r"Release it\?")
        assert "No request waits for it, so it will be free" in it.screen
        for line in keys.splitlines(keepends=True):
            it.types(line)
            if line == "maybe\n":
                await asyncio.to_thread(it.shows, r"the answer is y or n\s+Release it\?")
        assert await asyncio.to_thread(it.end) == code
        assert it.is_sane()
        assert ("nothing was changed" in it.text) is (code != 0)
    assert await redis.get("x") == (None if code == 0 else lease.token.encode())


WRONG = [
    *((words, "it is empty") for words in ("show ''", "ls ''", "watch ''", "release ''", "run '' -- true")),
    ("release x\udcff --json", "it is not UTF-8; in a pattern, ? stands for such a byte"),
    ("ls x\udcff*", "it is not UTF-8; in a pattern, ? stands for such a byte"),
    ("release x --kind mutex --yes", "mutex"),
    ("release x --token a --force", ""),
    ("release x --pid 1", ""),
    ("release x --host a --force", ""),
]
"""Commands, and what is said of them: an empty name is that of a script's variable that is not set."""


@pytest.mark.parametrize(("words", "said"), WRONG, ids=ascii)
async def test_a_wrong_name_or_choice_is_one_line_and_no_talk_of_a_bug(words: str, said: str) -> None:
    """It is refused before anything is connected."""
    done = await ran(*shlex.split(words), REDIS_URL="unix:///nowhere")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


async def test_names_and_identities_that_are_no_text_are_found_by_what_is_printed(
    server: EmbeddedServer, redis: Redis, sync: Coordinator
) -> None:
    async with sync.lock(b"x\xff"):
        assert (await ran("ls", "x?", "--url", server.url)).stdout.startswith("x\\xff\tlock\t")
    await sync.semaphore("x", limit=2).acquire(identity=b"\xff\x00")
    (found,) = (await ran_json("show", "x", "--url", server.url))["names"]
    done = await ran("release", "x", "--token", r"\xff\x00", "--yes", "--url", server.url)
    assert (done.returncode, found["holders"][0]["token"]) == (0, "\\xff\0")
    assert (await sync.semaphore("x", limit=2).statistics()).available == 2


async def test_what_may_not_be_read_is_not_called_free(server: EmbeddedServer, redis: Redis, sync: Coordinator) -> None:
    """The kinds that may be read come first, and the others are one line. Nor is a key of a wrong type."""
    url = ("--url", server.url)
    async with sync.lock("x"):
        async with a_user(redis, "~other:*", "+@all") as user:
            shown = (await ran("show", "x", *url, **user)).stdout
            ended = await ran("release", "x", "--yes", *url, **user)
        async with a_user(redis, "~x", "~{x}:fence", "+@all") as user:
            partly = (await ran("show", "x", *url, **user)).stdout
    assert "free" not in shown
    assert "not readable for this user" in shown
    assert shown.count("NOPERM") == 1
    assert (ended.returncode, ended.stdout) == (77, "")
    assert "'x' is not readable: the server refused to show" in ended.stderr
    assert partly.startswith("x  lock at ")
    assert partly.count("not readable for this user as: ") == 1
    assert "read/write, semaphore" in partly
    await redis.hset("y", "a", "b")
    shown = (await ran("show", "y", *url)).stdout
    assert "\n  cannot be used\n" in shown
    assert "free" not in shown
    assert await redis.hgetall("y") == {b"a": b"b"}
