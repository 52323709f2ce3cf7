"""The commands that look: ``ls``, ``show`` and ``watch``, and the changes between two looks."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Annotated, Literal, TypeAlias

import typer

from redis_sync_aio import SyncError
from redis_sync_aio._inspection.views import check
from redis_sync_aio.inspection import HolderView, NameView, WaiterView, escape, inspect

from .._session import Session, complain, not_empty
from . import render


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
Name = Annotated[str, typer.Argument(help="The exact name.", show_default=False, callback=not_empty)]
LS_EXITS = {0: "the names were listed, also when there are none"}
SHOW_EXITS = {0: "it is held, waited for, or remembered", 1: "the server knows nothing of that name"}
WATCH_EXITS = {0: "whatever reads the output has closed it"}


async def ls(
    session: Session,
    pattern: Pattern = "*",
    idle: Annotated[bool, typer.Option("--all", "-a", help="Also names without holders and waiters.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="List N names at most.")] = 1000,
) -> int:
    """List the names that are held or waited for: locks, semaphores, read/write locks, events, latches and barriers.

    In a pipe: tab-separated name, kind, holder, seconds held, seconds left, waiters, longest wait, problems. Only
    reads are sent to the server.
    """
    found = await inspect(session.client, pattern, limit=limit + 1, shown=10, idle=idle, prefix=session.prefix)
    views, more = found[:limit], len(found) > limit
    value = {"names": [asdict(view) for view in views], "more": more}
    session.output.show(value, lambda console: render.print_names(console, views, more))
    return 0


async def show(
    session: Session,
    name: Name,
    shown: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show N holders and N waiters at most.")
    ] = 100,
) -> int:
    """Show the holders of a name, its waiters and since when they wait, and what looks wrong.

    Only reads are sent to the server.
    """
    views = await inspect(session.client, escape(name), shown=shown, idle=True, prefix=session.prefix)
    value = {"names": [asdict(view) for view in views]}
    session.output.show(value, lambda console: render.print_name(console, name, views))
    return 0 if views else 1


# -- The changes between two looks, and their rates ------------------------------------------------------------

What: TypeAlias = Literal["granted", "released", "expired", "waits", "left"]
Key: TypeAlias = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to one holder or waiter since the look before."""

    what: What
    name: str
    kind: str
    token: str
    party: str
    fence: int | None = None
    seconds: float | None = None
    """For how long it was held or waited for, as far as is known; of a new grant: how long it waited."""

    def line(self) -> str:
        """Return the change as text."""
        time = "" if self.seconds is None else f" after {render.seconds(self.seconds)}"
        fence = f", fence {self.fence}" if self.fence and self.what == "granted" else ""
        return f"{render.plain(self.name)}  {self.what}  {self.party}{time}{fence}"


def keyed(views: Sequence[NameView]) -> dict[Key, NameView]:
    """Return the views by kind and name."""
    return {(view.kind, view.name): view for view in views}


def changes(before: dict[Key, NameView], after: dict[Key, NameView], elapsed: float) -> Iterator[Change]:
    """Iterate over what changed in ``elapsed`` seconds."""
    for key in {**before, **after}:
        yield from _of_name(before.get(key), after.get(key), elapsed)


def _of_name(before: NameView | None, after: NameView | None, elapsed: float) -> Iterator[Change]:
    had, has = _holders(before), _holders(after)
    waited, waits = _waiters(before), _waiters(after)
    view = after or before
    assert view is not None
    for one, holder in had.items():
        if one not in has:
            over = holder.remaining is not None and holder.remaining <= elapsed
            held = None if holder.held_for is None else holder.held_for + elapsed
            yield _change("expired" if over else "released", view, holder, held)
    for one, holder in has.items():
        if one not in had:
            waiter = waited.get(holder.token)
            yield _change("granted", view, holder, waiter.waited if waiter else None)
    tokens = {holder.token for holder in has.values()}
    for token, waiter in waited.items():
        if token not in waits and token not in tokens:
            yield _change("left", view, waiter, waiter.waited)
    for token, waiter in waits.items():
        if token not in waited:
            yield _change("waits", view, waiter, None)


def _change(what: What, view: NameView, one: HolderView | WaiterView, time: float | None) -> Change:
    fence = one.fence if isinstance(one, HolderView) else None
    return Change(what, view.name, view.kind, one.token, render.party(one), fence, time)


def _holders(view: NameView | None) -> dict[tuple[str, int | None], HolderView]:
    """Return the holders by token; of an identity, which may hold it again, by token and fence."""
    found = () if view is None else view.holders
    return {(it.token, it.fence if it.identity is not None else None): it for it in found}


def _waiters(view: NameView | None) -> dict[str, WaiterView]:
    return {} if view is None else {it.token: it for it in view.waiters}


@dataclass
class Rates:
    """The rates of changes over the latest looks."""

    span: float = 10.0
    """Seconds over which it is averaged."""
    _seen: list[tuple[float, Counter[What], Counter[Key]]] = field(default_factory=list)

    def add(self, time: float, found: Sequence[Change]) -> None:
        """Take the result of one look, at ``time`` (local clock)."""
        grants = Counter((one.kind, one.name) for one in found if one.what == "granted")
        self._seen.append((time, Counter(one.what for one in found), grants))
        while len(self._seen) > 2 and self._seen[1][0] < time - self.span:
            del self._seen[0]

    def _time(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if len(self._seen) > 1 else 0.0

    def of(self, what: What) -> float:
        """Return how often a second it happens."""
        time = self._time()
        return sum(counted[what] for _, counted, _ in self._seen[1:]) / time if time else 0.0

    def grants_of(self, key: Key) -> float:
        """Return how often a second a name is granted."""
        time = self._time()
        return sum(grants[key] for _, _, grants in self._seen[1:]) / time if time else 0.0


# -- ``watch``: a line for each change -------------------------------------------------------------------------


MOST = 100_000
"""Names that are looked at."""

Interval = Annotated[float, typer.Option("--interval", "-i", min=0.05, metavar="S", help="Seconds between two looks.")]


async def watch(
    session: Session,
    name: Annotated[
        str,
        typer.Argument(help="A name, or a pattern as in KEYS: 'orders:*'.", show_default=False, callback=finished),
    ] = "*",
    interval: Interval = 0.5,
) -> int:
    """Print a line for each change: granted, released, expired, waits, left (gave up, or was served and is done).

    It looks every --interval seconds, so what comes and goes between two looks is not seen. The first look tells of
    what is held and waited for already, as granted and waits. Only reads are sent to the server. With --json each line
    is a JSON document. While the server does not answer, it says so once and tries again. End it with Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    before, looked = keyed(()), loop.time()
    looked_once = failing = False
    while True:
        started = loop.time()
        try:
            now = keyed(await inspect(session.client, name, limit=MOST, prefix=session.prefix))
        except SyncError as error:
            if not looked_once:
                raise
            if not failing:
                complain(f"{error}. It looks again every {interval:g} seconds")
            failing = True
            await asyncio.sleep(interval)
            continue
        looked_once, failing = True, False
        for change in changes(before, now, started - looked):
            tell(session, change)
        sys.stdout.flush()
        before, looked = now, started
        await asyncio.sleep(interval)


def tell(session: Session, change: Change) -> None:
    """Print a change, with the time of day."""
    at = datetime.now().astimezone()
    if session.output.as_json:
        session.output.json({"time": at.isoformat(timespec="milliseconds"), **asdict(change)})
    else:
        print(f"{at:%H:%M:%S}  {change.line()}")
