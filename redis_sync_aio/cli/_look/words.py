"""Names, processes and times in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from redis_sync_aio._core.display import plain as plain
from redis_sync_aio.inspection import HolderView, MarkView, NameView, WaiterView

KINDS = {
    "lock": "lock",
    "robust": "robust",
    "semaphore": "sem",
    "read_write": "rw",
    "event": "event",
    "latch": "latch",
    "barrier": "barrier",
}

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
    """Return what became of a job, and for how long that is remembered."""
    state = "remembered (its state is not readable)" if it.state is None else MARKS[it.state]
    return f"{state}, {'forever' if it.remaining is None else f'for {seconds(it.remaining)} more'}"


def no_end(view: NameView) -> str:
    """Return what to say of a lease of which no end is known."""
    return "no ttl is known" if unreadable(view) else "no ttl"


def unreadable(view: NameView) -> bool:
    """Return whether the server refused to show some of it."""
    return any(it.code == "unreadable" for it in view.problems)


def longest_wait(view: NameView) -> float | None:
    """Return for how long the one has waited that waits longest, as far as is known."""
    return max((it.waited for it in view.waiters if it.waited is not None), default=None)


def as_json(view: NameView) -> dict[str, Any]:
    """Return a view as --json prints it: its attributes, with ``null`` for None."""
    return asdict(view)


def each_json(views: Iterable[NameView]) -> list[dict[str, Any]]:
    """Return several of them."""
    return [as_json(view) for view in views]
