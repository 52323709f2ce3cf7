"""What all errors of this package have in common."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar


class SyncError(Exception):
    """Base of every error of a lock, a lease or a transaction."""

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
