"""The screen of ``top`` and its keys. It knows neither the server nor the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from redis_sync_aio.inspection import NameView

from .._output import counted
from . import ls, words
from .changes import Key, Rates, changes, keyed
from .show import lines

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
            "waiters": lambda it: (-it.waiting, -(words.longest_wait(it) or 0.0), it.name),
            "longest wait": lambda it: (-(words.longest_wait(it) or 0.0), it.name),
            "time held": lambda it: (-(words.held_for(it) or 0.0), it.name),
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
        if self._looked is not None:
            self.rates.add(time, list(changes(self._views, now, time - self._looked)))
        else:
            self.rates.add(time, [])
        self._views, self._looked, self.error = now, time, ""

    @property
    def views(self) -> list[NameView]:
        """The names of the latest look."""
        return list(self._views.values())

    # -- keys ------------------------------------------------------------------------------------------

    def press(self, keys: str) -> None:
        """Obey what was typed."""
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
        """Return what fits into a terminal of that size."""
        if self._open is not None:
            body: list[Text | Table] = self._opened(height)
        elif self._looked is not None and not self._views:
            body = [Text("nothing is held or waited for")]
        elif self._filter and self._views and not self._shown():
            every = "the only one" if len(self._views) == 1 else f"all {len(self._views):,}"
            body = [Text(f"no name has {words.plain(self._filter)!r} in it: Esc shows {every}")]
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
            second += f"  /{words.plain(self._filter)}"
        found = [Text(words.plain(first), style="bold"), Text(second, style="dim")]
        if self.error:
            found[1] = Text(words.plain(self.error), style="red")
        for text in found:
            text.no_wrap, text.overflow = True, "ellipsis"
        return found

    def _table(self, width: int, height: int) -> Table:
        views, rows = self._shown(), max(1, height - HEAD)
        self._at = max(0, min(self._at, len(views) - 1))
        first = max(0, self._at - rows + 1)
        found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("NAME", "KIND", "HELD BY"):
            found.add_column(title, no_wrap=True)
        for title in ("FOR", "LEFT", "WAIT", "LONGEST", "GRANT/S"):
            found.add_column(title, justify="right", no_wrap=True)
        seen = views[first : first + rows]
        widths = ls.widths_of(seen, max(16, width - 50))
        for number, view in enumerate(seen, first):
            rate = self.rates.grants_of((view.kind, view.name))
            cells = [*ls.cells(view, widths), Text(f"{rate:.1f}" if rate else "")]
            found.add_row(*cells, style="reverse" if number == self._at else "yellow" if view.problems else "")
        return found

    def _opened(self, height: int) -> list[Text | Table]:
        assert self._open is not None
        view = self._views.get(self._open)
        if view is None:
            return [Text(f"{words.plain(self._open[1])}: nobody holds it or waits for it now")]
        found: list[Text | Table] = [*lines(view)]
        return found[: max(1, height - HEAD)]
