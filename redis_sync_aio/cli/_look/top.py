"""``top``: a live view of all names, its screen and its keys."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from redis_sync_aio import SyncError
from redis_sync_aio.inspection import NameView, inspect

from .._session import USAGE, Failure, Session, counted
from . import render
from .looking import Interval, Key, Pattern, Rates, changes, keyed

# -- The screen of ``top`` and its keys. It knows neither the server nor the terminal --------------------------


HELP = "s sort  / filter  ↑↓ or j k choose  Enter open  Esc back  q quit"
_KEYS = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_ARROWS = {"A": "k", "B": "j"}
HEAD = 4
"""Lines above the names, and below them."""


class TopScreen:
    """The state of the live view."""

    def __init__(self, address: str, interval: float) -> None:
        self.address, self.interval = address, interval
        self.rates = Rates()
        self.error = ""
        self.done = False
        self._views: dict[Key, NameView] = {}
        self._looked: float | None = None
        self._sorts: dict[str, Callable[[NameView], tuple[object, ...]]] = {
            "waiters": lambda it: (-it.waiting, -(render.longest_wait(it) or 0.0), it.name),
            "longest wait": lambda it: (-(render.longest_wait(it) or 0.0), it.name),
            "time held": lambda it: (-(render.held_for(it) or 0.0), it.name),
            "grants": lambda it: (-self.rates.grants_of((it.kind, it.name)), it.name),
            "name": lambda it: (it.name, it.kind),
        }
        self._sort = "waiters"
        self._filter = ""
        self._typing = False
        self._at = 0
        self._open: Key | None = None

    def take(self, views: Sequence[NameView], time: float) -> None:
        """Take a look at all names; ``time``: local clock."""
        now = keyed(views)
        found = [] if self._looked is None else list(changes(self._views, now, time - self._looked))
        self.rates.add(time, found)
        self._views, self._looked, self.error = now, time, ""

    @property
    def views(self) -> list[NameView]:
        """The names of the latest look."""
        return list(self._views.values())

    # -- keys ------------------------------------------------------------------------------------------

    def press(self, keys: str) -> None:
        """Obey the keys that were typed."""
        for key in _KEYS.findall(keys):
            if len(key) == 1:
                (self._type if self._typing else self._obey)(key)
            elif not self._typing and key[-1] in _ARROWS:
                self._obey(_ARROWS[key[-1]])

    def _type(self, key: str) -> None:
        if key in "\r\n":
            self._typing = False
        elif key == "\x1b":
            self._typing, self._filter = False, ""
        elif key in "\x7f\b":
            self._filter = self._filter[:-1]
        elif key.isprintable():
            self._filter += key
        self._at = 0

    def _obey(self, key: str) -> None:
        if key == "q":
            self.done = True
        elif key == "s":
            names = list(self._sorts)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        elif key == "/":
            self._typing, self._filter, self._open = True, "", None
        elif key in "jk":
            self._at = max(0, min(self._at + (1 if key == "j" else -1), len(self._shown()) - 1))
        elif key in "\r\n" and (found := self._shown()):
            view = found[min(self._at, len(found) - 1)]
            self._open = view.kind, view.name
        elif key == "\x1b":
            if self._open is None:
                self._filter = ""
            self._open = None

    # -- drawing ---------------------------------------------------------------------------------------

    def _shown(self) -> list[NameView]:
        found = [view for view in self._views.values() if self._filter.lower() in view.name.lower()]
        return sorted(found, key=self._sorts[self._sort])

    def draw(self, width: int, height: int) -> Group:
        """Return the lines that fit into a terminal of that size."""
        if self._open is not None:
            body: list[Text | Table] = self._opened(height)
        elif self._looked is not None and not self._views:
            body = [Text("nothing is held or waited for")]
        elif self._filter and self._views and not self._shown():
            every = "the only one" if len(self._views) == 1 else f"all {len(self._views):,}"
            body = [Text(f"no name has {render.plain(self._filter)!r} in it: Esc shows {every}")]
        else:
            body = [self._table(width, height)]
        footer = f"/{self._filter}▏" if self._typing else HELP
        return Group(*self._head(width), *body, Text(footer, style="dim", no_wrap=True, overflow="ellipsis"))

    def _head(self, width: int) -> list[Text]:
        views = self._views.values()
        held, waiting = sum(1 for it in views if it.held), sum(it.waiting for it in views)
        granted, expired, left = (self.rates.of(what) for what in ("granted", "expired", "left"))
        rates = [f"{granted:.1f} granted/s", f"{expired:.1f} expired/s", f"{left:.1f} left the queue/s"]
        seen = (
            "looking …"
            if self._looked is None
            else f"{counted(len(views), 'name')}, {held:,} held, {waiting:,} waiting"
        )
        first = f"{self.address}  every {self.interval:g}s  {seen}"
        second = f"{', '.join(rates)}  by {self._sort}"
        if self._filter and not self._typing:
            second += f"  /{render.plain(self._filter)}"
        found = [Text(render.plain(first), style="bold"), Text(second, style="dim")]
        if self.error:
            found[1] = Text(render.plain(self.error), style="red")
        for text in found:
            text.no_wrap, text.overflow = True, "ellipsis"
        return found

    def _table(self, width: int, height: int) -> Table:
        views, rows = self._shown(), max(1, height - HEAD)
        self._at = max(0, min(self._at, len(views) - 1))
        first = max(0, self._at - rows + 1)
        selected = views[self._at] if views else None
        rate = self.rates.grants_of
        return render.table(views[first : first + rows], width, lambda it: rate((it.kind, it.name)), selected)

    def _opened(self, height: int) -> list[Text | Table]:
        assert self._open is not None
        view = self._views.get(self._open)
        if view is None:
            return [Text(f"{render.plain(self._open[1])}: no holders and no waiters now")]
        found: list[Text | Table] = [*render.lines(view)]
        return found[: max(1, height - HEAD)]


TERMINATED = 128 + signal.SIGTERM
EXITS = {0: "ended by q, or whatever reads the output has closed it", TERMINATED: "ended by SIGTERM"}


async def top(
    session: Session,
    pattern: Pattern = "*",
    interval: Interval = 1.0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Look at N names at most.")] = 1000,
) -> int:
    """Show names live, by contention: holders, waiters, times, and how often names are granted.

    All of it is sampled: it looks every --interval seconds, and what comes and goes between two looks is not seen, so
    rates are lower bounds. "expired": leases that ended by their ttl; "left": waiters that gave up, or were served in
    between. Keys: s sort, / filter, arrows or j and k choose, Enter open, Esc back, q quit. With --json: a line for
    each look.
    """
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
    """Look again and again; errors after the first look are shown, and looking continues."""
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
    value: dict[str, Any] = {"names": [asdict(view) for view in screen.views], "per_second": rates}
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
