"""An observer, as long as it is attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeAlias

from . import logs
from .arguments import require_function

if TYPE_CHECKING:
    from .events import Event

Observer: TypeAlias = "Callable[[Event], object]"
"""A function that is called with each event; its result is ignored. See `redis_sync_aio.instrumentation`."""
PatternOf: TypeAlias = Callable[[str], str | None]
"""A function that returns the pattern of a name, or None to leave that to others."""


class Attached:
    """An observer that is attached: to one coordinator, or to all. It can be closed, and is a context manager."""

    __slots__ = ("_failed", "_observer", "_on_close", "_pattern_of")

    def __init__(
        self,
        observer: Observer,
        pattern_of: PatternOf | None = None,
        on_close: Callable[[Attached], object] | None = None,
    ) -> None:
        """Attach ``observer``. `observe_all` and coordinators do that. Raises TypeError for a bad argument."""
        require_function(observer, "observer")
        if pattern_of is not None:
            require_function(pattern_of, "pattern_of")
        self._observer: Observer | None = observer
        self._pattern_of = pattern_of
        self._on_close = on_close
        self._failed = False

    def _take(self, event: Event) -> None:
        """Give ``event`` to the observer. Its first error is logged; errors change nothing else here."""
        if self._observer is None:
            return
        try:
            self._observer(event)
        except BaseException as error:
            self._report(error)

    def _pattern(self, name: str) -> str | None:
        """Return the pattern of ``name`` by the function that came with the observer."""
        if self._pattern_of is None or self._observer is None:
            return None
        try:
            pattern = self._pattern_of(name)
        except BaseException as error:
            self._report(error)
            return None
        return pattern if isinstance(pattern, str) else None

    def _report(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            logs.log("observer_failed", raised=error, observer=repr(self._observer))
        logs.raise_later(error)

    def close(self) -> None:
        """Stop calling the observer. Idempotent, in any thread. A call that has begun in another thread goes on."""
        self._observer = None
        if self._on_close is not None:
            self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
