"""The text of names, holders and waiters: the table of `ls` and `top`, the lines of `show`, the words of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redis_sync_aio._core.display import plain as plain
from redis_sync_aio._core.keys import KINDS
from redis_sync_aio.inspection import HolderView, MarkView, NameView, WaiterView

from .._session import counted

MARKS = {
    "done": "done",
    "running": "running",
    "failed": "failed (an earlier run raised, was cancelled or was killed)",
}


def short(text: str, width: int) -> str:
    """Return text of at most so many characters; of a long one the end is kept, which tells names apart."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def seconds(value: float | None, otherwise: str = "") -> str:
    """Return a time with about three digits."""
    if value is None:
        return otherwise
    if value < 99.95:
        return f"{value:.1f}s"
    if value < 5400:
        return f"{value / 60:.0f}m"
    return f"{value / 3600:.0f}h" if value < 172_800 else f"{value / 86_400:.0f}d"


def party(one: HolderView | WaiterView) -> str:
    """Return who holds or waits: a process with its label, an identity, or the value of another program."""
    if one.host is not None:
        process = f"{one.host}:{one.pid}"
        found = process if one.label == process else f"{process} {one.label!r}"
    elif one.identity is not None:
        found = one.identity
    else:
        found = f"foreign {one.token!r}"
    return plain(f"{found} ({one.access})" if one.access else found)


def lease(one: HolderView) -> str:
    """Return who holds, with the fence if there is one."""
    return party(one) + (f", fence {one.fence}" if one.fence else "")


def holders(view: NameView) -> str:
    """Return the first holder, and how many more there are; of a job that is not running its state."""
    if not view.holders:
        if view.mark is not None:
            return view.mark.state or "?"
        return "?" if unreadable(view) and not view.available else "-"
    more = len(view.holders) - 1
    return party(view.holders[0]) + (f" +{more}" if more else "")


def held_for(view: NameView) -> float | None:
    """Return for how long the oldest holder has it, as far as is known."""
    return max((it.held_for for it in view.holders if it.held_for is not None), default=None)


def remaining(view: NameView) -> str:
    """Return when the first lease ends, or for how long a job that is not running is remembered."""
    if not view.holders:
        return seconds(view.mark.remaining, "never") if view.mark is not None else ""
    ends = [it.remaining for it in view.holders if it.remaining is not None]
    return seconds(min(ends)) if ends else "?" if unreadable(view) else "never"


def mark(it: MarkView) -> str:
    """Describe the outcome of a job, and for how long that is remembered."""
    state = "remembered (its state is not readable)" if it.state is None else MARKS[it.state]
    return f"{state}, {'forever' if it.remaining is None else f'for {seconds(it.remaining)} more'}"


def no_end(view: NameView) -> str:
    """Describe a lease without a known end."""
    return "no ttl is known" if unreadable(view) else "no ttl"


def unreadable(view: NameView) -> bool:
    """Return whether the server refused to show some of it."""
    return any(it.code == "unreadable" for it in view.problems)


def longest_wait(view: NameView) -> float | None:
    """Return for how long the one has waited that waits longest, as far as is known."""
    return max((it.waited for it in view.waiters if it.waited is not None), default=None)


# -- A table with a row for each name, for terminals; a line of it, for pipes ----------------------------------


def print_names(console: Console, views: Sequence[NameView], more: bool) -> None:
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
            console.print(Text(f"! {plain(view.name)}: {plain(problem.meaning)}", style="yellow"))
    if more:
        console.print(f"There are more than {counted(len(views), 'name')}: narrow the pattern, or use --limit")


def line(view: NameView) -> str:
    """Return the line of a name in a pipe."""
    left = next((it.remaining for it in view.holders), view.mark.remaining if view.mark is not None else None)
    numbers = [held_for(view), left, longest_wait(view)]
    held, left_text, longest = ("" if it is None else f"{it:.3f}" for it in numbers)
    problems = ",".join(it.code for it in view.problems)
    fields = [plain(view.name), view.kind, holders(view), held, left_text, str(view.waiting), longest]
    return "\t".join([*fields, problems])


def table(
    views: Sequence[NameView],
    width: int,
    rate: Callable[[NameView], float] | None = None,
    selected: NameView | None = None,
) -> Table:
    """Return the table of a terminal, which fits into its width. ``rate``: grants of a name per second."""
    numbers = ["FOR", "LEFT", "WAIT", "LONGEST", *(["GRANT/S"] if rate is not None else [])]
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("NAME", "KIND", "HELD BY"):
        found.add_column(title, no_wrap=True)
    for title in numbers:
        found.add_column(title, justify="right", no_wrap=True)
    rest = max(16, width - 10 * len(numbers))
    held_by = min(max((len(holder_of(view)) for view in views), default=0), rest // 2)
    for view in views:
        name = plain(view.name) + (" !" if view.problems else "")
        cells = [
            short(name, rest - max(held_by, len("HELD BY"))),
            KINDS[view.kind].ending or view.kind,
            short(holder_of(view), held_by),
            seconds(held_for(view)),
            remaining(view),
            str(view.waiting or ""),
            seconds(longest_wait(view)),
        ]
        if rate is not None:
            cells.append(f"{rate(view):.1f}" if rate(view) else "")
        style = "reverse" if view is selected else "yellow" if view.problems else ""
        found.add_row(*map(Text, cells), style=style)
    return found


def holder_of(view: NameView) -> str:
    """Return the text of the column of holders."""
    holder = holders(view)
    if view.limit == 0:
        return f"{view.held}/0 paused" + (f" {holder}" if view.holders else "")
    return holder if view.limit in (None, 1) else f"{view.held}/{view.limit} {holder}"


# -- Everything about one name ---------------------------------------------------------------------------------

NOT_CONNECTED = "not connected: it has ended, is cut off, or polls by now"


def print_name(console: Console, name: str, views: Iterable[NameView]) -> None:
    """Print every kind that stands under the name, and which kinds this user may not read."""
    views = list(views)
    hidden = [view for view in views if unreadable(view) and not view.holders and not view.waiting]
    found = [text for view in views if view not in hidden for text in (*lines(view), Text())]
    if hidden:
        kinds = ", ".join(_kind(view) for view in hidden)
        found.append(Text.assemble((plain(name), "bold"), f"  not readable for this user as: {kinds}"))
        found += [*_problems(hidden[0]), Text()]
    for text in found[:-1]:
        console.print(text, soft_wrap=not console.is_terminal)
    if not found:
        console.print(Text(f"nothing is known of {plain(name)!r}"))


def lines(view: NameView) -> Iterator[Text]:
    """Iterate over the lines about one name."""
    yield Text.assemble((plain(view.name), "bold"), f"  {_kind(view)} at {view.server}")
    yield Text(f"  {state(view)}", style="" if view.held or view.problems else "green")
    for holder in view.holders:
        yield Text("  held by ").append_text(_of_holder(holder, no_end(view)))
    if view.waiting:
        yield Text(f"  waiting: {view.waiting}")
    for number, waiter in enumerate(view.waiters, 1):
        yield Text(f"  {number:>4}. ").append_text(_of_waiter(waiter))
    if view.waiting > len(view.waiters):
        yield Text(f"        and {view.waiting - len(view.waiters)} more")
    if view.mark is not None:
        yield Text(f"  job: {mark(view.mark)}")
    yield from _problems(view)


def _kind(view: NameView) -> str:
    return view.kind.replace("_", "/")


def _problems(view: NameView) -> Iterator[Text]:
    return (Text(f"  ! {plain(problem.meaning)}", style="yellow") for problem in view.problems)


def state(view: NameView) -> str:
    """Describe its holders, or whether it lets in its waiters."""
    if unreadable(view) and not (view.held or view.available):
        return "not readable for this user"
    if not view.held and any(it.code == "wrong_type" for it in view.problems):
        return "cannot be used"
    if closed := KINDS[view.kind].closed:
        return closed if view.waiting else "no request waits for it"
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
    parts = [f"for {seconds(it.held_for)}"] if it.held_for is not None else []
    parts.append(no_end if it.remaining is None else f"{seconds(it.remaining)} left unless renewed")
    parts += [f"{it.weight} permits"] if it.weight > 1 else []
    parts += [f"fence {it.fence}"] if it.fence else []
    if it.connected is not None:
        parts.append("connected" if it.connected else NOT_CONNECTED)
    return Text.assemble((party(it), "bold"), f", {', '.join(parts)}\n           token {plain(it.token)}")


def _of_waiter(it: WaiterView) -> Text:
    parts = [] if it.waited is None else [f"for {seconds(it.waited)}"]
    parts += [f"{it.weight} permits"] if it.weight > 1 else []
    parts += ["polls"] if it.polls else []
    parts += ["gone: the next release passes it over"] if it.alive is False else []
    return Text(", ".join([party(it), *parts]))
