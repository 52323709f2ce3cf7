"""``ls``: one line for each name that is held or waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redis_sync_aio._inspection.views import check
from redis_sync_aio.inspection import NameView, inspect

from .._session import Session, Shared, counted, execute, not_empty
from . import words

EXITS = {0: "the names were listed, also when there are none"}


def finished(pattern: str) -> str:
    """Return a pattern of the command line; raise BadParameter if it is empty, or has no end."""
    try:
        check(not_empty(pattern).encode())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return pattern


Pattern = Annotated[
    str, typer.Argument(help="A pattern of names, as in KEYS: 'orders:*'.", show_default=False, callback=finished)
]


def ls(
    shared: Shared,
    pattern: Pattern = "*",
    idle: Annotated[bool, typer.Option("--all", "-a", help="Also names that nobody holds or waits for now.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="List N names at most.")] = 1000,
) -> None:
    """List what is held or waited for: locks, semaphores, read/write locks, events, latches and barriers.

    In a pipe: tab-separated name, kind, holder, seconds held, seconds left, waiters, longest wait, problems. Only
    reads are sent to the server.
    """
    execute(shared, lambda session: list_names(session, pattern, limit, idle))


async def list_names(session: Session, pattern: str, limit: int, idle: bool) -> int:
    """Print the names that match."""
    found = await inspect(session.client, pattern, limit=limit + 1, shown=10, idle=idle, prefix=session.prefix)
    views, more = found[:limit], len(found) > limit
    value: dict[str, Any] = {"names": words.each_json(views), "more": more}
    session.output.show(value, lambda console: show(console, views, more))
    return 0


def show(console: Console, views: Sequence[NameView], more: bool) -> None:
    """Print a table in a terminal, else lines with tabs."""
    if not console.is_terminal:
        for view in views:
            print(line(view))
        return
    if not views:
        console.print("nothing is held or waited for")
        return
    console.print(table(views, console.width))
    for view in views:
        for problem in view.problems:
            console.print(Text(f"! {words.plain(view.name)}: {words.plain(problem.meaning)}", style="yellow"))
    if more:
        console.print(f"There are more than {counted(len(views), 'name')}: narrow the pattern, or use --limit")


def line(view: NameView) -> str:
    """Return what a pipe gets for a name."""
    left = next((it.remaining for it in view.holders), view.mark.remaining if view.mark is not None else None)
    numbers = [words.held_for(view), left, words.longest_wait(view)]
    held, left_text, longest = ("" if it is None else f"{it:.3f}" for it in numbers)
    problems = ",".join(it.code for it in view.problems)
    fields = [words.plain(view.name), view.kind, words.holders(view), held, left_text, str(view.waiting), longest]
    return "\t".join([*fields, problems])


def table(views: Sequence[NameView], width: int) -> Table:
    """Return the table of a terminal, which fits into its width."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    widths = widths_of(views, max(24, width - 40))  # 40: for the numbers
    for title, justify in (("NAME", "left"), ("KIND", "left"), ("HELD BY", "left")):
        found.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for title in ("FOR", "LEFT", "WAIT", "LONGEST"):
        found.add_column(title, justify="right", no_wrap=True)
    for view in views:
        found.add_row(*cells(view, widths), style="yellow" if view.problems else "")
    return found


def holder_of(view: NameView) -> str:
    """Return what stands in the column of holders."""
    holder = words.holders(view)
    if view.limit == 0:
        return f"{view.held}/0 paused" + (f" {holder}" if view.holders else "")
    return holder if view.limit in (None, 1) else f"{view.held}/{view.limit} {holder}"


def widths_of(views: Sequence[NameView], rest: int) -> tuple[int, int]:
    """Return how wide the columns of names and of holders are, which share ``rest`` characters."""
    holder = min(max((len(holder_of(view)) for view in views), default=0), rest // 2)
    return rest - max(holder, len("HELD BY")), holder


def cells(view: NameView, widths: tuple[int, int]) -> list[Text]:
    """Return the row of a name."""
    name = words.plain(view.name) + (" !" if view.problems else "")
    return [
        Text(words.short(name, widths[0])),
        Text(words.KINDS[view.kind]),
        Text(words.short(holder_of(view), widths[1])),
        Text(words.seconds(words.held_for(view))),
        Text(words.remaining(view)),
        Text(str(view.waiting) if view.waiting else ""),
        Text(words.seconds(words.longest_wait(view))),
    ]
