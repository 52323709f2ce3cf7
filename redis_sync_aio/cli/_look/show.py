"""``show``: everything that the server knows of one name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from redis_sync_aio._core.keys import CLOSED
from redis_sync_aio.inspection import HolderView, NameView, WaiterView, escape, inspect

from .._session import Session, Shared, counted, execute, not_empty
from . import words

EXITS = {0: "it is held, waited for, or remembered", 1: "the server knows nothing of that name"}

NOT_CONNECTED = "not connected: it has ended, is cut off, or polls by now"

Name = Annotated[str, typer.Argument(help="The exact name.", show_default=False, callback=not_empty)]


def show(
    shared: Shared,
    name: Name,
    shown: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show N holders and N waiters at most.")
    ] = 100,
) -> None:
    """Show the holders of a name, its waiters and since when they wait, and what looks wrong.

    Only reads are sent to the server.
    """
    execute(shared, lambda session: show_name(session, name, shown))


async def show_name(session: Session, name: str, shown: int) -> int:
    """Print what stands under a name."""
    views = await inspect(session.client, escape(name), shown=shown, idle=True, prefix=session.prefix)
    session.output.show({"names": words.each_json(views)}, lambda console: print_all(console, name, views))
    return 0 if views else 1


def print_all(console: Console, name: str, views: Iterable[NameView]) -> None:
    """Print every kind that stands under the name, and which kinds this user may not read."""
    views = list(views)
    hidden = [view for view in views if words.unreadable(view) and not view.holders and not view.waiting]
    found = [text for view in views if view not in hidden for text in (*lines(view), Text())]
    if hidden:
        kinds = ", ".join(_kind(view) for view in hidden)
        found.append(Text.assemble((words.plain(name), "bold"), f"  not readable for this user as: {kinds}"))
        found += [*_problems(hidden[0]), Text()]
    for text in found[:-1]:
        console.print(text, soft_wrap=not console.is_terminal)
    if not found:
        console.print(Text(f"nothing is known of {words.plain(name)!r}"))


def lines(view: NameView) -> Iterator[Text]:
    """Iterate over the lines about one name."""
    yield Text.assemble((words.plain(view.name), "bold"), f"  {_kind(view)} at {view.server}")
    yield Text(f"  {state(view)}", style="" if view.held or view.problems else "green")
    for holder in view.holders:
        yield Text("  held by ").append_text(_of_holder(holder, words.no_end(view)))
    if view.waiting:
        yield Text(f"  waiting: {view.waiting}")
    for number, waiter in enumerate(view.waiters, 1):
        yield Text(f"  {number:>4}. ").append_text(_of_waiter(waiter))
    if view.waiting > len(view.waiters):
        yield Text(f"        and {view.waiting - len(view.waiters)} more")
    if view.mark is not None:
        yield Text(f"  job: {words.mark(view.mark)}")
    yield from _problems(view)


def _kind(view: NameView) -> str:
    return view.kind.replace("_", "/")


def _problems(view: NameView) -> Iterator[Text]:
    return (Text(f"  ! {words.plain(problem.meaning)}", style="yellow") for problem in view.problems)


def state(view: NameView) -> str:
    """Return what is held of it, or whether it lets in those that wait."""
    if words.unreadable(view) and not (view.held or view.available):
        return "not readable for this user"
    if not view.held and any(it.code == "wrong_type" for it in view.problems):
        return "cannot be used"
    if view.kind in CLOSED:
        return CLOSED[view.kind] if view.waiting else "nobody waits for it"
    fence = f", last fence {view.fence}" if view.fence else ""
    if view.limit == 0:
        return f"paused (limit 0), {counted(view.held, 'permit')} {'is' if view.held == 1 else 'are'} held{fence}"
    if view.limit not in (None, 1):
        return f"{view.held} of {view.limit} permits {'is' if view.held == 1 else 'are'} held{fence}"
    if not view.held:
        return f"free{fence}"
    by = {it.access for it in view.holders}
    whom = " by a writer" if by == {"write"} else f" by {counted(view.held, 'reader')}" if by == {"read"} else ""
    return f"held{whom}{fence}"


def _of_holder(it: HolderView, no_end: str) -> Text:
    parts = [f"for {words.seconds(it.held_for)}"] if it.held_for is not None else []
    parts.append(no_end if it.remaining is None else f"{words.seconds(it.remaining)} left unless renewed")
    parts += [f"{it.weight} permits"] if it.weight > 1 else []
    parts += [f"fence {it.fence}"] if it.fence else []
    if it.connected is not None:
        parts.append("connected" if it.connected else NOT_CONNECTED)
    return Text.assemble((words.party(it), "bold"), f", {', '.join(parts)}\n           token {words.plain(it.token)}")


def _of_waiter(it: WaiterView) -> Text:
    parts = [] if it.waited is None else [f"for {words.seconds(it.waited)}"]
    parts += [f"{it.weight} permits"] if it.weight > 1 else []
    parts += ["polls"] if it.polls else []
    parts += ["gone: the next release passes it over"] if it.alive is False else []
    return Text(", ".join([words.party(it), *parts]))
