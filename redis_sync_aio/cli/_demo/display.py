"""The progress of a run, while it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from .run import Kill, ReportedGrant


class Display:
    """Progress: a bar per product in a terminal, else a line now and then."""

    COLUMNS = 2

    def __init__(self, console: Console, stock: Mapping[int, int]) -> None:
        self._console = console
        self._stock = stock
        self._total = sum(stock.values())
        self._sold = dict.fromkeys(stock, 0)
        self._count = 0
        self._since = 0.0
        self._stuck: dict[int, int] = {}  # product -> when its holder was killed
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self) -> None:
        """Note that the workers begin to sell."""
        self._since = time.monotonic()

    def granted(self, grant: ReportedGrant) -> None:
        """Note that a worker got a lock."""
        if grant.got > self._stuck.get(grant.product, grant.got):
            del self._stuck[grant.product]
            self._console.print(f"{self._at()} product {grant.product} is worker {grant.process}'s: the lease ran out")

    def ended(self, grant: ReportedGrant) -> None:
        """Note that a worker released its lock."""
        if grant.item:
            self._sold[grant.product] += 1
            self._count += 1
            if not self._console.is_terminal and self._count % max(1, self._total // 4) == 0:
                self._console.print(f"{self._at()} {self._progress()}")

    def killed(self, kill: Kill) -> None:
        """Note that a worker was killed while it held a lock."""
        self._stuck[kill.product] = kill.at
        self._console.print(
            f"{self._at()} worker {kill.process} killed (SIGKILL) while it held the lock of product {kill.product}"
        )

    def _at(self) -> str:
        return f"{time.monotonic() - self._since:6.2f} s "

    def _progress(self) -> str:
        rate = self._count / max(time.monotonic() - self._since, 0.001) if self._since else 0.0
        return f"{self._count:,} of {self._total:,} sold, {rate:,.0f} per second"

    def _draw(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        names = list(self._stock)
        rows = math.ceil(len(names) / self.COLUMNS)
        for row in range(rows):
            cells = [cell for product in names[row::rows] for cell in self._bar(product)]
            grid.add_row(*cells)
        grid.caption = self._progress()
        return grid

    def _bar(self, product: int) -> tuple[str, ProgressBar]:
        colour = "red" if product in self._stuck else "default"
        bar = ProgressBar(total=self._stock[product], completed=self._sold[product], width=20, complete_style="cyan")
        return f"[{colour}]product {product}[/]", bar
