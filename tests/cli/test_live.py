"""``watch`` and ``top``: what changes, and a terminal that is as it was afterwards."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from rich.console import Console

from redis_sync_aio import Coordinator
from redis_sync_aio.cli._look import render
from redis_sync_aio.cli._look.looking import changes, keyed
from redis_sync_aio.cli._look.top import TopScreen
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import HolderView, NameView, WaiterView
from tests.support.inspecting import seen

from ..support.programs import command, piped
from .terminals import Terminal, terminal

pytestmark = pytest.mark.real

FAST = ("--interval", "0.05")
SHOW_CURSOR, LEAVE = "\x1b[?25h", "\x1b[?1049l"


async def shows(it: Terminal, pattern: str) -> str:
    """Wait for what a program prints while the event loop goes on."""
    return await asyncio.to_thread(it.shows, pattern)


async def ends(it: Terminal) -> int:
    """Wait for the end of a program while the event loop goes on."""
    return await asyncio.to_thread(it.end)


def assert_left(it: Terminal) -> None:
    """The terminal is as it was: lines and echo, the cursor, the usual screen."""
    assert it.is_sane()
    assert it.screen.rindex(SHOW_CURSOR) > it.screen.rindex("\x1b[?25l")
    assert it.screen.rindex(LEAVE) > it.screen.rindex("\x1b[?1049h")


async def test_watch_prints_what_changes(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """A line of JSON for each change; Ctrl-C ends it with 130."""
    with terminal("watch", "x", "--json", *FAST, "--url", server.url, columns=500) as it:
        lease = await sync.lock("x").acquire()
        await shows(it, '"what": "granted"')
        waiting = asyncio.create_task(other.lock("x").acquire())
        await shows(it, '"what": "waits"')
        waiting.cancel()
        await shows(it, '"what": "left"')
        await lease.release()
        await shows(it, '"what": "released"')
        it.types("\x03")
        assert await ends(it) == 130
        assert it.is_sane()
        lines = [json.loads(line) for line in it.screen.splitlines() if line.startswith("{")]
        assert {line["token"] for line in lines if line["what"] in ("granted", "released")} == {lease.token}
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.ci
async def test_watch_ends_with_whatever_reads_it(server: EmbeddedServer, sync: Coordinator) -> None:
    """As in ``redis-sync-aio watch | head -1``: no error, no traceback."""
    with piped("watch", "x", *FAST, "--url", server.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lease = await sync.lock("x").acquire()
        assert "x  granted" in await asyncio.to_thread(process.stdout.readline)
        process.stdout.close()
        await lease.release()
        assert await asyncio.to_thread(process.stderr.read) == ""
        assert await asyncio.to_thread(process.wait, 50) == 0


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "shown", "silent", "key", "code"),
    [
        (["watch", "x"], "x  granted", "did not answer.* again every", "\x03", 130),
        (["top"], "1 name, 1 held", "did not answer", "q", 0),
    ],
    ids=["watch", "top"],
)
async def test_it_says_that_the_server_is_away_and_shows_names_again_when_it_is_back(
    words: list[str], shown: str, silent: str, key: str, code: int
) -> None:
    """Each time that it is away."""
    with EmbeddedServer(port=0) as server:
        url = server.url
        with terminal(*words, *FAST, "--connect-timeout", "1", "--url", url, columns=500) as it:
            async with server.client() as client, Coordinator(client) as sync, sync.lock("x"):
                await shows(it, shown)
            for _ in range(2):
                before = len(it.screen)
                server.kill()
                await asyncio.to_thread(it.shows_after, before, silent)
                before = len(it.screen)
                await asyncio.to_thread(server.restart, keep_data=False)
                async with server.client() as client, Coordinator(client) as sync, sync.lock("x"):
                    await asyncio.to_thread(it.shows_after, before, shown)
            it.types(key)
            assert await ends(it) == code
            assert it.is_sane()
    done = await asyncio.to_thread(command, "top", "--json", "--url", url)
    assert done.returncode == 69


async def test_top_sorts_filters_opens_and_quits(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    """Each key does what the last line says; it draws for a new size; q leaves the terminal as it was."""
    async with sync.lock("top:1"), sync.lock("top:2"):
        waiting = asyncio.create_task(other.lock("top:1").acquire())
        await seen(redis, "top:1", lambda it: len(it.waiters) == 1)
        with terminal("top", "top:*", *FAST, "--url", server.url, NO_COLOR="1") as it:
            await shows(it, "2 names, 2 held, 1 waiting")
            it.types("s")
            await shows(it, "  by longest wait")
            it.types("/nope\r")
            await shows(it, r"no name has 'nope' in it: Esc shows all 2")
            it.types("\x1b")
            it.types("/P:1")
            await shows(it, "/P:1")
            it.types("\r")
            await shows(it, "by longest wait  /P:1")
            it.types("\r")
            await shows(it, r"waiting: 1")
            it.types("\x1b")
            it.resize(40, 10)
            await shows(it, "  Ent…")
            it.types("q")
            assert await ends(it) == 0
            assert_left(it)
            assert "\x1b[3" not in it.screen
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.ci
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_top_that_a_signal_ends_leaves_the_terminal_clean(
    server: EmbeddedServer, sync: Coordinator, number: int, code: int
) -> None:
    async with sync.lock("x"):
        with terminal("top", *FAST, "--url", server.url) as it:
            await shows(it, "1 name, 1 held")
            it.process.send_signal(number)
            assert await ends(it) == code
            assert_left(it)
            assert "Traceback" not in it.screen


def test_top_needs_a_terminal(server: EmbeddedServer) -> None:
    done = command("top", "--url", server.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "top --json" in done.stderr


# -- what it works out, without a server ---------------------------------------------------------------------


def holder(token: str, **more: Any) -> HolderView:
    """Return a holder."""
    return HolderView(**{"token": token, "identity": None, "label": "h:1", "host": "h", "pid": 1,
                         "held_for": 1.0, "remaining": 5.0, "fence": 1} | more)  # fmt: skip


def named(*holders: HolderView, waiters: tuple[str, ...] = (), name: str = "x") -> NameView:
    """Return a lock."""
    waiting = tuple(WaiterView(token, None, "h:1", "h", 1, 2.0) for token in waiters)
    return NameView(name, "lock", "here", holders, waiting, len(holders), len(waiting), 1, 1 - len(holders), 1)


def found(before: NameView | None, after: NameView | None, elapsed: float = 1.0) -> list[tuple[str, str]]:
    """Return what changed, and for whom."""
    views = [keyed([it] if it else []) for it in (before, after)]
    return [(it.what, it.token) for it in changes(views[0], views[1], elapsed)]


def test_changes_are_told_apart() -> None:
    """A grant from the queue is no departure; a lease whose time was up has expired; an identity may return."""
    assert found(None, named(holder("a"))) == [("granted", "a")]
    assert found(named(holder("a")), None) == [("released", "a")]
    assert found(named(holder("a", remaining=0.5)), None) == [("expired", "a")]
    assert found(named(holder("a"), waiters=("b", "c")), named(holder("b"), waiters=("d",))) == [
        ("released", "a"), ("granted", "b"), ("left", "c"), ("waits", "d"),
    ]  # fmt: skip
    mine = holder("me", identity="me", host=None)
    assert found(named(mine), named(replace(mine, fence=2))) == [("released", "me"), ("granted", "me")]
    shared = holder("h:1:ab:1~")
    assert found(named(shared), named(replace(shared, fence=129))) == []  # it only reserved more fences


def test_rates_are_of_the_latest_seconds() -> None:
    """Two grants in ten seconds are 0.2 a second, of the name and in all."""
    screen = TopScreen("here", 1.0)
    for second in range(11):
        screen.take([named(holder(f"t{second // 5}"))], float(second))
    assert screen.rates.of("granted") == 0.2
    assert screen.rates.grants_of(("lock", "x")) == 0.2
    assert screen.rates.of("left") == 0.0


def test_a_table_fits_whatever_its_rows_are() -> None:
    """A long name in one row, a long holder in another: each is shortened at its front, nothing at its end."""
    rows = [named(holder("t", host="h" * 60), name="short:1"), named(holder("t"), name="n" * 90 + ":42")]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(render.table(rows, 80))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= 80
    assert "n:42 " in printed
    assert "short:1" in printed
    assert "h:1 " in printed
