"""Pages about what happened: everything that happened is on them, and everything on them happened."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.instrumentation import ConnectionLost, ConnectionRestored, RenewedLate, Stalled
from redis_sync_aio.tracing import Trace, merged, tracing
from redis_sync_aio.tracing._files import read, trace_events
from redis_sync_aio.tracing._recorder import Recorder
from redis_sync_aio.tracing._timeline import Mark, Timeline, Turn, lanes
from tests.support.body import FAST, waits
from tests.support.inside import now


class Page(HTMLParser):
    """What a person can read on a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._told: list[tuple[set[str], str]] = []  # classes of a bar, and its tooltip
        self._lane = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a bar, or the lane in which the next bars are."""
        found = {key: value or "" for key, value in attrs}
        classes = set(found.get("class", "").split())
        if tag == "b":
            self._told.append(({self._lane, *classes}, found["title"]))
        elif "lane" in classes:
            self._lane = " ".join(classes - {"lane"})

    def handle_data(self, data: str) -> None:
        """Note a visible text."""
        self.texts.append(" ".join(data.split()))

    def told(self, kind: str) -> list[str]:
        """The tooltips of all bars of one class: "holds", "waits", "lost", "gave-up", "mark"."""
        return [told for classes, told in self._told if kind in classes]


def page(trace: Trace, directory: Path, **options: Any) -> Page:
    path = directory / "run.html"
    trace.save(path, **options)
    return Page(path)


async def wait_behind(holder: Coordinator, waiter: Coordinator, name: str) -> None:
    """Let one coordinator wait for what another one holds, and get it."""
    held = await holder.lock(name).acquire()
    waiting = asyncio.create_task(waiter.lock(name).acquire(), name="the waiter")
    await wait_until(waits(holder.lock(name)), FAST, timeout=30)
    await held.release()
    await (await waiting).release()


async def test_a_page_shows_holders_waiters_and_losses(
    sync: Coordinator, other: Coordinator, redis: Redis, tmp_path: Path
) -> None:
    async with tracing(process="web 1") as trace:
        await wait_behind(sync, other, "orders:42")
        async with sync.lock("orders:42"):
            with pytest.raises(AcquireTimeout):
                await asyncio.create_task(other.lock("orders:42").acquire(timeout=0.05))
        lease = await sync.lock("orders:43").acquire()
        await redis.delete("orders:43")
        with pytest.raises(LeaseLost) as caught:
            await lease.extend(5)
    assert (trace.requests, trace.dropped) == (5, 0)
    seen = page(trace, tmp_path)
    assert {"web 1", "orders:42", "orders:43"} <= set(seen.texts)
    assert len(seen.told("holds")) == 4
    waited, gave_up = seen.told("waits")
    assert waited.startswith("orders:42\nweb 1, the waiter\nasked at ")
    assert "released" in waited
    assert seen.told("gave-up") == [gave_up]
    assert "the wait timed out" in gave_up
    [lost] = seen.told("lost")
    assert f"lost: {caught.value.reason}" in lost
    assert str(lease.fence) in lost


async def test_what_still_goes_on_is_drawn_to_the_end(sync: Coordinator, other: Coordinator, tmp_path: Path) -> None:
    async with tracing() as trace, sync.lock("orders:42"):
        waiting = asyncio.create_task(other.lock("orders:42").acquire())
        await wait_until(waits(sync.lock("orders:42")), FAST, timeout=30)
        seen = page(trace, tmp_path)
    await (await waiting).release()
    [held] = seen.told("holds")
    [waited] = seen.told("waits")
    assert "still going on when the trace ended" in held
    assert "still going on when the trace ended" in waited


async def test_one_coordinator_can_be_traced_alone(
    sync: Coordinator, other: Coordinator, redis: Redis, tmp_path: Path
) -> None:
    async with tracing(sync) as one, tracing() as all_of_them:
        for lock in (sync.lock("a"), other.lock("b"), AsyncLock(redis, "c")):
            async with lock:
                pass
    assert [told.split()[0] for told in page(one, tmp_path).told("holds")] == ["a"]
    assert [told.split()[0] for told in page(all_of_them, tmp_path).told("holds")] == ["a", "b", "c"]
    with pytest.raises(TypeError, match="takes a Coordinator, or nothing to trace all of them"):
        async with tracing(redis):  # type: ignore[arg-type]
            pass


async def test_a_hand_over_inside_the_process_is_told(sync: Coordinator, tmp_path: Path) -> None:
    lock = sync.lock("orders:42", share=True)

    async def take() -> None:
        async with lock:
            await asyncio.sleep(0)

    async with tracing() as trace:
        await asyncio.gather(*(take() for _ in range(5)))
    seen = page(trace, tmp_path)
    assert seen.told("handed-over")
    assert len(seen.told("holds")) == 5


async def test_memory_is_bounded_and_the_page_says_what_it_lacks(sync: Coordinator, tmp_path: Path) -> None:
    async with tracing(limit=10) as trace:
        for number in range(25):
            async with sync.lock(f"orders:{number}"):
                pass
    assert (trace.requests, trace.dropped) == (10, 15)
    seen = page(trace, tmp_path)
    assert {told.split()[0] for told in seen.told("holds")} == {f"orders:{number}" for number in range(15, 25)}
    assert any(text.startswith("15 earlier requests and marks are not shown") for text in seen.texts)


async def test_of_many_holders_some_are_drawn(sync: Coordinator, tmp_path: Path) -> None:
    semaphore = sync.semaphore("smtp", limit=20)
    async with tracing() as trace:
        leases = [await semaphore.acquire() for _ in range(20)]
        for lease in leases:
            await lease.release()
    seen = page(trace, tmp_path)
    assert "up to 20 at a time, 12 are shown" in seen.texts
    assert len(seen.told("holds")) == 12


async def test_json_keeps_the_rules_of_the_trace_event_format(
    sync: Coordinator, other: Coordinator, tmp_path: Path
) -> None:
    """As Perfetto and Chrome read it: complete events of one thread never overlap, and each thread has a name."""
    path = tmp_path / "run.json"
    async with tracing(process="web 1") as trace:
        await asyncio.gather(*(wait_behind(sync, other, f"orders:{number % 3}") for number in range(3)))
        async with sync.semaphore("smtp", limit=3), sync.semaphore("smtp", limit=3):
            pass  # two at a time are in two threads
    trace.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    threads = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M", "i")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["s"] in ("t", "p", "g")
    assert set(threads) == set(named)
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 0.0015  # microseconds, of three digits
    assert set(named.values()) >= {"orders:0", "orders:0 (waiting)", "smtp"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["web 1"]


@pytest.mark.real
async def test_traces_of_several_processes_make_one_page_and_those_of_machines_are_aligned_by_the_time_of_day(
    sync: Coordinator, other: Coordinator, tmp_path: Path
) -> None:
    """Each process saves what it saw; the rows of both are drawn from the files.

    The monotonic clocks of machines differ by anything: here the second one began to count a day earlier."""
    async with tracing(sync, process="web 1") as first, tracing(other, process="web 2") as second:
        await wait_behind(sync, other, "orders:42")
    first.save(tmp_path / "1.json")
    second.save(tmp_path / "2.json")
    both = merged(tmp_path / "1.json", tmp_path / "2.json")
    assert both.requests == 2
    seen = page(both, tmp_path)
    assert seen.texts.count("orders:42") == 3, "a row of each process, and one of the table"
    assert {"web 1", "web 2"} <= set(seen.texts)
    assert [told.split("\n")[1].split(",")[0] for told in seen.told("holds")] == ["web 1", "web 2"]
    saved = json.loads((tmp_path / "2.json").read_text())
    own, day = saved["redis_sync_aio"], 86_400.0
    own["host"] = "another machine"
    own["wall"] -= day
    for record in (own, *own["turns"]):
        for field in ("started", "ended", "asked", "granted"):
            if field in record:
                record[field] += day
    (tmp_path / "2.json").write_text(json.dumps(saved))
    timeline = read([tmp_path / "1.json", tmp_path / "2.json"])
    assert timeline.ended - timeline.started < 3600
    holder, waiter = timeline.turns
    assert holder.granted is not None
    assert holder.ended is not None
    assert waiter.granted is not None
    assert holder.granted < waiter.asked < waiter.granted
    # What was merged is in the clock of the first file, wherever it is merged and saved again.
    merged(tmp_path / "2.json").save(tmp_path / "again.json")
    again = read([tmp_path / "1.json", tmp_path / "again.json"])
    assert again.ended - again.started < 3600
    own["format"] += 1
    (tmp_path / "2.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="another version of redis_sync_aio"):
        merged(tmp_path / "2.json")


def test_times_of_another_machine_are_in_the_clock_of_the_first_file(tmp_path: Path) -> None:
    """Of what has ended, and of a lease that was still held when its own trace ended."""
    first = Timeline(100, 130, [Turn("x", "web 1", 101, 102, 103, "released")])
    second = Timeline(
        500, 510, [Turn("x", "web 2", 501, 502), Turn("x", "web 2", 503)], [Mark(504, "web 2", "", "", 505)]
    )
    for name, timeline, wall in (("1", first, 1000), ("2", second, 605)):  # the second clock is 395 seconds ahead
        (tmp_path / name).write_text(json.dumps(trace_events(timeline, f"machine {name}", wall)))
    both = read([tmp_path / "1", tmp_path / "2"])
    assert [(turn.asked, turn.granted, turn.ended) for turn in both.turns] == [
        (101, 102, 103),
        (106, 107, 115),
        (108, None, 115),
    ]
    assert [(mark.time, mark.until) for mark in both.marks] == [(109, 110)]
    assert (both.started, both.ended) == (100, 130)


async def test_outages_and_stalls_are_drawn(sync: Coordinator, tmp_path: Path) -> None:
    """These are hard to cause on purpose, so the recorder is given the events themselves."""
    facts: dict[str, Any] = {"kind": "", "name": "", "pattern": "", "server": "h:6379", "request": 0}
    recorder = Recorder("web 1", 10)
    since = now()
    for event in (
        ConnectionLost(**facts, time=since + 1),
        ConnectionRestored(**facts, time=since + 3, after=2.0, rechecked=1),
        Stalled(**facts, time=since + 5, seconds=1.5),
        RenewedLate(**facts | {"name": "orders:42", "request": 7}, time=since + 6, lateness=0.7, left=0.1),
        ConnectionLost(**facts, time=since + 7),
    ):
        recorder(event)
    timeline = recorder.timeline()
    assert [(mark.text, mark.until) for mark in timeline.marks] == [
        ("connection to h:6379 lost", since + 3),
        ("event loop stalled for 1,500 ms", since + 5),
        ("renewed 700 ms late", None),
        ("connection to h:6379 lost", None),
    ]
    async with tracing(process="web 1") as trace, sync.lock("orders:42"):
        pass
    drawn = recorder.timeline()
    drawn.turns, drawn.ended = trace._timeline.turns, since + 10
    told = page(Trace(drawn), tmp_path).told("mark")
    assert len(told) == 4
    assert any(one.startswith("event loop stalled for 1,500 ms, at ") for one in told)


async def test_names_are_escaped_and_may_have_characters_that_html_has_not(sync: Coordinator, tmp_path: Path) -> None:
    name = '<b>"&" & more\x1b[31m\x00\uffff'
    async with tracing(process="<i>") as trace, sync.lock(name):
        pass
    seen = page(trace, tmp_path, title="a < b")
    shown = r'<b>"&" & more\x1b[31m\x00\uffff'
    assert {shown, "a < b", "<i>"} <= set(seen.texts)
    assert shown in seen.told("holds")[0]
    assert "<b>" not in (tmp_path / "run.html").read_text()


async def test_what_cannot_be_saved_or_read_is_refused(tmp_path: Path) -> None:
    async with tracing() as trace:
        pass
    for suffix in ("html", "json"):
        trace.save(tmp_path / f"empty.{suffix}")  # nothing happened: that is no error
    with pytest.raises(ValueError, match=r"must end in .html or .json"):
        trace.save(tmp_path / "run.svg")
    with pytest.raises(ValueError, match="limit must be 1 or more, not 0"):
        async with tracing(limit=0):
            pass
    mistakes: tuple[dict[str, Any], ...] = ({"limit": "many"}, {"process": 5})
    for wrong in mistakes:
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
            async with tracing(**wrong):
                pass
    saved = json.loads((tmp_path / "empty.json").read_text())["redis_sync_aio"]
    others: tuple[object, ...] = (
        {"traceEvents": []},
        [],
        {"redis_sync_aio": {}},
        {"redis_sync_aio": saved | {"turns": [{"colour": "red"}]}},
        {"redis_sync_aio": {key: value for key, value in saved.items() if key != "marks"}},
    )
    for other in others:
        (tmp_path / "other.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match="is not a trace of redis_sync_aio"):
            merged(tmp_path / "other.json")
    with pytest.raises(ValueError, match="there is no file to read"):
        merged()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)))
def test_lanes_never_overlap_and_are_as_few_as_possible(spans: list[list[int]]) -> None:
    turn = Turn("x", "p", 0.0)
    given_spans = [(float(start), float(end), turn) for start, end in spans]
    found = lanes(given_spans)
    assert sorted(span[:2] for lane in found for span in lane) == sorted(span[:2] for span in given_spans)
    for lane in found:
        assert all(before[1] <= after[0] for before, after in pairwise(lane))
    if all(start < end for start, end in spans):
        moments = {start for start, _, _ in given_spans}
        at_once = [sum(start <= moment < end for start, end, _ in given_spans) for moment in moments]
        assert len(found) == max(at_once, default=0)
