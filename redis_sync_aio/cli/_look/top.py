"""``top``: a live view of all names."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from redis_sync_aio import SyncError
from redis_sync_aio.inspection import inspect

from .._failures import USAGE, Failure
from .._session import Session, execute
from .._shared import Shared
from . import words
from .ls import Pattern
from .screen import TopScreen
from .watch import Interval

TERMINATED = 128 + signal.SIGTERM
EXITS = {0: "ended by q, or whatever reads the output has closed it", TERMINATED: "ended by SIGTERM"}


def top(
    shared: Shared,
    pattern: Pattern = "*",
    interval: Interval = 1.0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Look at N names at most.")] = 1000,
) -> None:
    """Show names live, by contention: holders, waiters, times, and how often names are granted.

    All of it is sampled: it looks every --interval seconds, and what comes and goes between two looks is not seen, so
    rates are lower bounds. "expired": leases that ended by their ttl; "left": waiters that gave up, or were served in
    between. Keys: s sort, / filter, arrows or j and k choose, Enter open, Esc back, q quit. With --json: a line for
    each look.
    """
    execute(shared, lambda session: run_top(session, pattern, interval, limit))


async def run_top(session: Session, pattern: str, interval: float, limit: int) -> int:
    """Look and draw until q is pressed."""
    screen = TopScreen(session.address.shown, interval)
    if session.output.as_json:
        await sample(session, screen, pattern, limit, interval, lambda: print_sample(session, screen))
        return 0
    if not session.output.console.is_terminal:
        raise Failure("top needs a terminal: use ls, watch, or top --json", USAGE)
    changed = asyncio.Event()
    sampling = asyncio.create_task(
        sample(session, screen, pattern, limit, interval, changed.set), name="redis_sync_aio top"
    )
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = screen.done = True
        changed.set()

    try:
        with keys_of_terminal(screen, changed.set), signals(changed.set, terminate):
            await draw(session.output.console, screen, changed, sampling)
    finally:
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    return TERMINATED if terminated else 0


async def sample(
    session: Session, screen: TopScreen, pattern: str, limit: int, interval: float, then: Callable[[], object]
) -> None:
    """Look again and again; errors after the first look are shown, and it goes on."""
    loop, first = asyncio.get_running_loop(), True
    while True:
        try:
            views = await inspect(session.client, pattern, limit=limit, prefix=session.prefix)
        except SyncError as error:
            if first:
                raise
            screen.error = str(error)
        else:
            screen.take(views, loop.time())
            first = False
        then()
        await asyncio.sleep(interval)


def print_sample(session: Session, screen: TopScreen) -> None:
    """Print one look as JSON."""
    rates = {what: round(screen.rates.of(what), 3) for what in ("granted", "released", "expired", "left")}
    value: dict[str, Any] = {"names": words.each_json(screen.views), "per_second": rates}
    session.output.json(value | ({"error": screen.error} if screen.error else {}))


async def draw(console: Console, screen: TopScreen, changed: asyncio.Event, sampling: asyncio.Task[None]) -> None:
    """Draw after each change, on the other screen of the terminal, which is left in any case."""
    sampling.add_done_callback(lambda _: changed.set())
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.done:
            live.update(screen.draw(console.width, console.height), refresh=True)
            await changed.wait()
            changed.clear()
            if sampling.done():
                sampling.result()


@contextmanager
def keys_of_terminal(screen: TopScreen, then: Callable[[], object]) -> Iterator[None]:
    """Pass single keys to the screen, and restore the terminal in the end."""
    if not sys.stdin.isatty():
        yield
        return
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> None:
        keys = os.read(terminal, 64).decode(errors="ignore")
        if not keys:  # the terminal was closed
            screen.done = True
        screen.press(keys)
        then()

    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, pressed)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def signals(resized: Callable[[], object], terminate: Callable[[], object]) -> Iterator[None]:
    """Call ``resized`` when the terminal gets another size, and ``terminate`` when the program is asked to end."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, resized)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGTERM)
