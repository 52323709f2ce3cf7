"""The base of all errors of this package."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from itertools import islice
from typing import TypeVar

# -- Names, times and pages of the documentation as messages show them -----------------------------------------


MAX_LISTED = 10
"""Names that one message shows."""
SITE = "https://redis-sync-aio.github.io/redis-sync-aio/"
"""Where the documentation is published: an installed package has no docs/."""


def listed(names: Collection[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    shown = ", ".join(map(repr, islice(names, MAX_LISTED)))
    more = len(names) - MAX_LISTED
    return f"{shown} and {more:,} more" if more > 0 else shown


def within(seconds: float) -> str:
    """Return "within 0.5 seconds" for a message. The rest of a timeout would have many digits."""
    if seconds == 0:
        return "immediately"
    return f"within {seconds if seconds < 0.001 else round(seconds, 3)} seconds"


def no_answer(name: str) -> str:
    """Return the reason for a request about ``name`` that ended before the first answer."""
    return f"Redis has not answered yet about {name!r}; allow more time"


def page(name: str, section: str = "") -> str:
    """Return the address of a page of the documentation, as in "operations/servers", or of a section on it."""
    return f"{SITE}{name}/" + (f"#{section}" if section else "")


RELEASE_TO_WRITE = "release that lease before you acquire the write side"
"""Advice to a reader that wants to write."""
_LONGER = "wait longer, or look at statistics() for the holders"


def time_allowed(seconds: float | None) -> str:
    """Return the time that a request was allowed to wait, for a message; empty if that was unlimited."""
    return "" if seconds is None else f" {within(seconds)}"


def held_here(it: str, use: str = "") -> str:
    """Return a sentence: this process holds ``it``, and a task that waits for itself has a remedy."""
    itself = f"If the holder is the task that asks, it waits for itself{f': {use}' if use else ''}"
    return f"this process holds {it}. {itself}; else {_LONGER}"


def held_elsewhere(it: str, held_by: str = "") -> str:
    """Return a sentence: others hold ``it``, with their names if they are known."""
    if held_by:
        return f"{'' if it in ('it', 'them') else f'{it} is '}held by {held_by}; {_LONGER}"
    return f"others hold {it} or wait for {'them' if it == 'them' else 'it'}; {_LONGER}"


class SyncError(Exception):
    """The base of every error of a lock, a lease, a transaction or a coordinator.

    Bad arguments raise TypeError or ValueError instead. Most classes have a second base, such as `TimeoutError` or
    redis-py's `ConnectionError`. Each message names the lock and says what to do. All errors can be pickled and copied.

    It is raised itself only if a reply cannot be used: a proxy or a module changes replies, or another program wrote to
    the keys. **State:** the request is undone where possible; others are not affected. **Do:** look for those two;
    otherwise report it.
    """

    def __repr__(self) -> str:
        """Return class and message; redis-py's ConnectionError would show neither."""
        return BaseException.__repr__(self)

    def __reduce__(self) -> tuple[Callable[..., SyncError], tuple[object, ...], dict[str, object]]:
        """Pickle and copy it with its attributes; by default the class is called with ``args`` alone."""
        return _restore, (type(self), self.args), vars(self)


def _restore(kind: type[SyncError], args: tuple[object, ...]) -> SyncError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


E = TypeVar("E", bound=BaseException)


def copy_error(error: E) -> E:
    """Return another error that says the same, to be raised in another task: a traceback and notes are one task's."""
    twin = copy(error)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        twin.__notes__ = [*notes]
    return twin
