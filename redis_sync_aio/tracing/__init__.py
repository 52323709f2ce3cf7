"""A page about what happened to locks: who held which, who waited, what was lost.

Trace a part of a program, and save the page::

    async with tracing(coordinator) as trace:
        await do_work()
    trace.save("run.html")

``run.json`` is a file that Perfetto (ui.perfetto.dev) and chrome://tracing show. The JSON files of several processes
make one page::

    merged("web-1.json", "web-2.json").save("both.html")
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .._core.arguments import count
from .._core.clock import now, wall_ns
from .._core.display import shown
from .._leases.implicit import CoordinatorLike, binding_of
from ..instrumentation import observe_all
from ._files import read, trace_events
from ._page import html_page
from ._recorder import Recorder
from ._timeline import Timeline

__all__ = ["Trace", "merged", "tracing"]

TITLE = "Who held which lock, and when"


class Trace:
    """The events of a run. `tracing` and `merged` make it."""

    def __init__(self, recorded: Recorder | Timeline) -> None:
        self._recorded = recorded

    @property
    def _timeline(self) -> Timeline:
        return self._recorded if isinstance(self._recorded, Timeline) else self._recorded.timeline()

    @property
    def requests(self) -> int:
        """The number of requests that the trace has now."""
        return len(self._timeline.turns)

    @property
    def dropped(self) -> int:
        """The number of earlier requests and marks that were forgotten, since there were more than the limit."""
        return self._timeline.dropped

    def save(self, path: str | os.PathLike[str], *, title: str = TITLE) -> None:
        """Write the trace to a file: a page (.html) or trace events (.json).

        Args:
            path: The file. The suffix chooses the format. An existing file is replaced.
            title: The title of the page.

        Raises:
            ValueError: The suffix is another one.
            OSError: The file cannot be written.
        """
        path, timeline = Path(path), self._timeline
        match path.suffix.lower():
            case ".html" | ".htm":
                text = html_page(timeline, title)
            case ".json":
                text = json.dumps(trace_events(timeline, socket.gethostname(), wall_ns() / 1e9 - now()))
            case _:
                raise ValueError(f"{str(path)!r} must end in .html or .json: that chooses what is written")
        path.write_text(text, "utf-8")


@asynccontextmanager
async def tracing(
    coordinator: CoordinatorLike | None = None, *, limit: int = 20_000, process: str | None = None
) -> AsyncIterator[Trace]:
    """Trace the locks that are used inside the block.

    Args:
        coordinator: The coordinator whose locks are traced. None: all coordinators of this process, including implicit
            ones.
        limit: How many requests are remembered, the latest ones. The page says how many were dropped.
        process: The name of this process on pages. Default: host and process id.

    Raises:
        ValueError: ``limit`` is less than 1.
        TypeError: ``coordinator`` is something else, ``limit`` is no whole number, or ``process`` is no text.
        WrongContext, CoordinatorClosed: The coordinator cannot be used here.
    """
    binding = binding_of(coordinator)
    if coordinator is not None and binding is None:
        raise TypeError(f"tracing() takes a Coordinator, or nothing to trace all of them, not {shown(coordinator)}")
    if process is not None and not isinstance(process, str):
        raise TypeError(f"process must be str, not {shown(process)}")
    recorder = Recorder(process or f"{socket.gethostname()}:{os.getpid()}", count(limit, "limit", 1))
    with observe_all(recorder) if binding is None else binding.hub().observing.attach(recorder):
        try:
            yield Trace(recorder)
        finally:
            recorder.stop()


def merged(*paths: str | os.PathLike[str]) -> Trace:
    """Return one trace of the JSON files that several processes saved.

    Processes of different machines are aligned by the time of day, so their order is as good as their clocks are
    synchronised.

    Raises:
        ValueError: A file is not one that a trace saved.
    """
    return Trace(read(map(Path, paths)))
