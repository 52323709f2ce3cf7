"""Whatever is counted: none, one and two of it are told in English."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from redis_sync_aio import Coordinator
from redis_sync_aio.cli._look.ending import announced, held_by
from redis_sync_aio.cli._look.render import state
from redis_sync_aio.cli._look.top import TopScreen
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import HolderView, NameView, WaiterView

from ..support.inside import Access, Kind
from .terminals import terminal

pytestmark = pytest.mark.real


def view(
    held: int, *, kind: Kind = "lock", limit: int | None = 1, access: Access | None = None, waiting: int = 0,
    name: str = "x",
) -> NameView:  # fmt: skip
    """Return a name with so many holders and waiters."""
    holders = tuple(HolderView(f"t{it}", None, f"h:{it}", "h", it, 1.0, 5.0, None, access=access) for it in range(held))
    waiters = tuple(WaiterView(f"w{it}", None, f"h:{it}", "h", it, 2.0) for it in range(waiting))
    return NameView(name, kind, "here", holders, waiters, held, waiting, limit, 0, None)


def test_what_show_says_is_held() -> None:
    assert [state(view(it, kind="semaphore", limit=2)) for it in (0, 1, 2)] == [
        "0 of 2 permits are held",
        "1 of 2 permits is held",
        "2 of 2 permits are held",
    ]
    assert [state(view(it, kind="semaphore", limit=0)) for it in (0, 1)] == [
        "paused (limit 0), 0 permits are held",
        "paused (limit 0), 1 permit is held",
    ]
    reads = [state(view(it, kind="read_write", limit=None, access="read")) for it in (0, 1, 2)]
    assert reads == ["free", "held by 1 reader", "held by 2 readers"]
    assert state(view(1, kind="read_write", limit=None, access="write")) == "held by a writer"
    assert state(view(1)) == "held"


def test_what_release_says_of_holders_and_waiters() -> None:
    assert [held_by(view(it)) for it in (1, 2)] == ["h:0 holds", "h:0 +1 hold"]
    said = [announced(one, one.holders)[-1] for one in (view(1, waiting=it) for it in (0, 1, 2))]
    assert said == [
        "- No request waits for it, so it will be free.",
        "- The next waiter gets it immediately: h:0.",
        "- The next waiter gets it immediately: h:0. 2 wait in all.",
    ]
    permits = view(1, kind="semaphore", limit=3, waiting=1)
    assert announced(permits, permits.holders)[-1] == "- The next waiter gets it as soon as enough is free: h:0."
    paused = view(1, kind="semaphore", limit=0, waiting=1)
    assert announced(paused, paused.holders)[-1].startswith("- The next waiter gets it when a resize raises the limit")


@pytest.mark.parametrize(("number", "head", "hidden"), [
    (0, "0 names, 0 held, 0 waiting", "nothing is held or waited for"),
    (1, "1 name, 1 held, 0 waiting", "no name has 'y' in it: Esc shows the only one"),
    (2, "2 names, 2 held, 0 waiting", "no name has 'y' in it: Esc shows all 2"),
])  # fmt: skip
def test_what_top_says_of_names(number: int, head: str, hidden: str) -> None:
    screen, console = TopScreen("here", 1.0), Console(width=100)
    screen.take([view(1, name=f"x{it}") for it in range(number)], 0.0)
    screen.press("/y\r")
    with console.capture() as printed:
        console.print(screen.draw(100, 20))
    assert head in printed.get()
    assert hidden in printed.get()


@pytest.mark.ci
async def test_more_names_than_are_listed(server: EmbeddedServer, sync: Coordinator) -> None:
    """As commands print it."""
    async with sync.lock("a"), sync.lock("b"), sync.lock("c"):
        for limit, said in ((1, "There are more than 1 name:"), (2, "There are more than 2 names:")):
            with terminal("ls", "-n", str(limit), "--url", server.url) as it:
                assert await asyncio.to_thread(it.end) == 0
                assert said in it.screen
