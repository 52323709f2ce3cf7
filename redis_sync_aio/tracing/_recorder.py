"""Makes turns and marks of events, in bounded memory."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from .._core import events
from .._core.clock import now
from ._timeline import Mark, Timeline, Turn, duration

MARKS = 1000
"""The number of marks that are remembered, the latest."""


class Recorder:
    """An observer that remembers the latest ``limit`` requests, and `MARKS` marks. Usable in several threads."""

    def __init__(self, process: str, limit: int) -> None:
        self._process = process
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[int, Turn] = {}  # by request
        self._ended: deque[Turn] = deque(maxlen=limit)
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._lost_connections: dict[str, float] = {}  # by server: since when
        self._dropped = 0
        self._started = now()
        self._stopped: float | None = None

    def __call__(self, event: events.Event) -> None:
        """Record one event."""
        with self._lock:
            if isinstance(
                event,
                (events.Requested, events.HandedOver, events.Granted, events.Withdrawn, events.Released, events.Lost),
            ):
                self._record(event)
            else:
                self._mark(event)

    def stop(self) -> None:
        """Let the run end now."""
        self._stopped = self._stopped or now()

    def timeline(self) -> Timeline:
        """Return the events so far."""
        with self._lock:
            turns = [*self._ended, *self._open.values()][-self._limit :]
            dropped = self._dropped + len(self._ended) + len(self._open) - len(turns)
            marks = list(self._marks)
            for server, since in self._lost_connections.items():
                marks.append(Mark(since, self._process, f"connection to {server} lost"))
        started = min((turn.asked for turn in turns), default=self._started) if dropped else self._started
        return Timeline(started, self._stopped or now(), turns, marks, dropped)

    def _record(self, event: events.Event) -> None:
        if isinstance(event, events.Requested):
            if len(self._open) >= self._limit:
                self._dropped += 1
                return
            self._open[event.request] = Turn(
                event.name, self._process, event.time, kind=event.kind, task=_current_task()
            )  # fmt: skip
            return
        turn = self._open.get(event.request)
        if turn is None:  # it began before the trace, or was dropped
            return
        match event:
            case events.HandedOver():
                turn.handed_over = True
            case events.Granted():
                turn.granted, turn.fence, turn.contended = event.time, event.fence, event.contended
            case events.Withdrawn():
                self._end(turn, event, event.outcome, "" if event.error is None else str(event.error))
            case events.Released():
                self._end(turn, event, "released")
            case events.Lost():
                self._end(turn, event, "lost", event.reason)

    def _end(self, turn: Turn, event: events.Event, outcome: str, note: str = "") -> None:
        turn.ended, turn.outcome, turn.note = event.time, outcome, note
        del self._open[event.request]
        self._dropped += len(self._ended) == self._limit
        self._ended.append(turn)

    def _mark(self, event: events.Event) -> None:
        match event:
            case events.ConnectionLost():
                self._lost_connections.setdefault(event.server, event.time)
            case events.ConnectionRestored():
                since = self._lost_connections.pop(event.server, event.time - event.after)
                self._add(since, f"connection to {event.server} lost", until=event.time)
            case events.Stalled():
                text = f"event loop stalled for {duration(event.seconds)}"
                self._add(event.time - event.seconds, text, until=event.time)
            case events.RenewedLate():
                self._add(event.time, f"renewed {duration(event.lateness)} late", event.name)

    def _add(self, time: float, text: str, name: str = "", until: float | None = None) -> None:
        self._dropped += len(self._marks) == MARKS
        self._marks.append(Mark(max(time, self._started), self._process, text, name, until))


def _current_task() -> str:
    """Return the name of the task that asks; "" where there is none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return ""
    return "" if task is None else task.get_name()
