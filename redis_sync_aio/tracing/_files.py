"""Timelines as JSON files: trace events that Perfetto and Chrome show, and our own part, to merge them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ._timeline import Mark, Span, Timeline, Turn, holds, lanes, waits

FORMAT = 1
"""The version of our own part of the JSON files."""
OWN = "redis_sync_aio"
"""Our own part: the timeline, to merge it with others. Viewers ignore it."""


def trace_events(timeline: Timeline, host: str, wall: float) -> dict[str, Any]:
    """Return the timeline in Chrome's trace event format, and with it what `read` needs.

    Each process is a process, each name has threads: one for the holds that do not overlap, one for the waits.
    ``host`` and ``wall``: this machine, and the time of day when its clock began; of what was merged, the timeline
    knows better.
    """
    events: list[dict[str, Any]] = []
    of_process: dict[str, list[Turn]] = {}
    for turn in timeline.turns:
        of_process.setdefault(turn.process, []).append(turn)
    threads = 0
    for pid, process in enumerate(timeline.processes, 1):
        events.append(_named("process_name", pid, 0, process))
        names: dict[str, list[Turn]] = {}
        for turn in sorted(of_process.get(process, ()), key=lambda turn: turn.asked):
            names.setdefault(turn.name, []).append(turn)
        for name, of_name in names.items():
            for what, spans in (("held", holds(timeline, of_name)), ("waiting", waits(timeline, of_name))):
                for lane in lanes(spans):
                    threads += 1
                    label = name if what == "held" else f"{name} (waiting)"
                    events += _lane(timeline, lane, what, label, pid, threads)
        marks = [mark for mark in timeline.marks if mark.process == process]
        events += [_mark(timeline, mark, pid) for mark in marks]
    host, wall = timeline.clock or (host, wall)
    own = {"format": FORMAT, "host": host, "wall": wall, **asdict(timeline)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": "redis_sync_aio"}, OWN: own}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _lane(
    timeline: Timeline, lane: Sequence[Span], what: str, label: str, pid: int, tid: int
) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", pid, tid, label)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    end = 0.0
    for since, until, turn in lane:
        start = max(_micros(timeline, since), end)  # rounding must not make neighbours overlap
        end = max(_micros(timeline, until), start)
        known = {"task": turn.task, "kind": turn.kind, "fence": turn.fence, "outcome": turn.outcome, "note": turn.note}
        args = {"lock": turn.name} | {key: value for key, value in known.items() if value not in ("", None)}
        shown = f"{what}: {turn.task}" if turn.task else what
        at = {"pid": pid, "tid": tid, "cat": what}
        yield {"ph": "X", "name": shown, "ts": start, "dur": round(end - start, 3), **at, "args": args}
        if turn.outcome == "lost" and what == "held":
            yield {"ph": "i", "s": "t", "name": f"lost: {turn.note}", "ts": end, **at, "args": args}


def _mark(timeline: Timeline, mark: Mark, pid: int) -> dict[str, Any]:
    event = {"ph": "i", "s": "p", "name": mark.text, "cat": "incident", "pid": pid, "tid": 0}
    return event | {"ts": _micros(timeline, mark.time), "args": {"lock": mark.name} if mark.name else {}}


def _micros(timeline: Timeline, time: float) -> float:
    return round((time - timeline.started) * 1e6, 3)


def read(paths: Iterable[Path]) -> Timeline:
    """Return the JSON files of several processes as one timeline.

    Processes of one machine have one clock; the clocks of others are compared by the time of day.
    Raises ValueError when a file is not one that a trace saved.
    """
    files = [_own(path) for path in paths]
    if not files:
        raise ValueError("there is no file to read: name at least one that a trace saved as .json")
    base = files[0]
    merged = Timeline(base["started"], base["ended"], clock=(base["host"], base["wall"]))
    for own in files:
        shift = 0.0 if own["host"] == base["host"] else own["wall"] - base["wall"]
        turns = [_shifted(turn, shift, ("asked", "granted", "ended")) for turn in own["turns"]]
        merged.turns += turns
        merged.marks += [_shifted(mark, shift, ("time", "until")) for mark in own["marks"]]
        merged.dropped += own["dropped"]
        merged.started = min(merged.started, own["started"] + shift)
        merged.ended = max(merged.ended, own["ended"] + shift)
        for turn in turns:  # it ends with its own trace, not with the last of all
            if turn.ended is None:
                turn.ended = own["ended"] + shift
    return merged


def _own(path: Path) -> Mapping[str, Any]:
    """Return our own part of one file, with its turns and marks as such."""
    refused = ValueError(f"{path} is not a trace of redis_sync_aio: save one by trace.save('….json')")
    try:
        own = dict(json.loads(path.read_text("utf-8"))[OWN])
        if own["format"] != FORMAT:
            refused = ValueError(f"{path} was saved by another version of redis_sync_aio (format {own['format']})")
            raise refused
        own["turns"] = [Turn(**turn) for turn in own["turns"]]
        own["marks"] = [Mark(**mark) for mark in own["marks"]]
    except (ValueError, KeyError, TypeError):
        raise refused from None
    return own


T = TypeVar("T", Turn, Mark)


def _shifted(thing: T, shift: float, fields: Sequence[str]) -> T:
    for field in fields:
        time = getattr(thing, field)
        if shift and time is not None:
            setattr(thing, field, time + shift)
    return thing
