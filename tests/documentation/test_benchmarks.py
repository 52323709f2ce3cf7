"""The benchmarks run, produce their figures, and notice a lock that excludes nobody."""

from __future__ import annotations

import io
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import footprint, page, scenarios
from benchmarks.contestants import BY_NAME
from benchmarks.measure import (
    contest,
    handovers,
    jain,
    miscounted,
    overlaps,
    peak,
    percentile,
    torn,
)
from benchmarks.pictures import Bar, Panel, draw
from benchmarks.plain_words import LABELS, WORDS
from benchmarks.report import saved, show, write
from benchmarks.runner import benchmark
from benchmarks.scenario import SMOKE, Outcome, Round
from benchmarks.scenarios.permits import crowded
from benchmarks.targets import Verdict, verdicts
from redis_sync_aio.embedded import EmbeddedServer

DOCS = Path(__file__).parents[2] / "docs" / "assets"
MS = 1_000_000
OURS_ONLY = ("s3", "s3work", "s3one", "lone", "s4", "s5", "s5work", "s4sem", "cost", "s8s1b5", "s8s5b1", "s8s1b1")
EXCLUDING = [
    "s1",
    "s2",
    "s3",
    "s3work",
    "s3one",
    "lone",
    "handover",
    "s4",
    "s6",
    "s5",
    "s5work",
    "s2sem",
    "s4sem",
    "rw",
    "s8",
]
PICTURES = ("benchmarks-uncontended", "benchmarks-contended", "benchmarks-sharing", "local-sharing")
NO_TARGETS = {"s3work", "s3one", "lone", "s8s5b1", "s8s1b1"}  # where `ours` is not compared with others


def run(keys: str, *names: str) -> tuple[list[Outcome], dict[str, Any]]:
    chosen = [scenarios.BY_KEY[key] for key in keys.split()]
    return benchmark(chosen, names, SMOKE, uvloop=False, tcp=False, progress=lambda text: None)


@pytest.fixture(scope="module")
def everything() -> tuple[list[Outcome], dict[str, Any]]:
    """All scenarios, as short as possible; redis-py is left out where its many tasks take seconds to finish."""
    others = " ".join(key for key in scenarios.BY_KEY if key not in OURS_ONLY)
    outcomes, about = run(others, "ours", "redis-py", "ours-lock")
    return outcomes + run(" ".join(OURS_ONLY), "ours")[0], about


@pytest.mark.ci
def test_every_scenario_has_its_figures(everything: tuple[list[Outcome], dict[str, Any]], tmp_path: Path) -> None:
    outcomes, about = everything
    judged = verdicts(outcomes)
    show(Console(file=io.StringIO()), outcomes, judged, about)
    write(tmp_path, outcomes, judged, about, plot=False)  # importing matplotlib takes seconds

    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert found["failures"] == found["violations"] == []
    assert set(found["scenarios"]) == set(scenarios.BY_KEY)
    for key, scenario in scenarios.BY_KEY.items():
        other = "ours-lock" if key == "rw" else "redis-py"
        for name in ("ours",) if key in OURS_ONLY else ("ours", other):
            figures = found["scenarios"][key]["figures"][name]
            assert set(figures) == {column.key for column in scenario.columns}
            assert all(len(figure["rounds"]) == SMOKE.rounds for figure in figures.values())
    assert {target["scenario"] for target in found["targets"]} == set(scenarios.BY_KEY) - NO_TARGETS
    ours = {outcome.scenario.key: partial(outcome.figure, "ours") for outcome in outcomes}
    costs = {"s1": "commands_per_pair reads_per_pair", "tx": "reads", "guarded": "reads"}
    for key, names in costs.items():
        assert [ours[key](name) for name in names.split()] == pytest.approx([2] * len(names.split()), abs=0.05)
    for key in ("s4", "s4sem"):
        assert (ours[key]("commands_per_second"), ours[key]("connections")) == (0, 1)
    assert [ours["s6"](name) for name in ("stuck", "ignored", "left")] == [0, 0, 0]
    assert ours["s5"]("peak") == ours["s5work"]("peak") == 5
    assert (ours["rw"]("peak") or 0) > 5


def test_the_target_of_a_lone_task_is_its_slice_and_three_round_trips() -> None:
    outcome = Outcome(scenarios.BY_KEY["lone"])
    outcome.add("ours-shared", Round({"p99_ms": 5.5, "trip_ms": 0.2}))
    (shared,) = verdicts([outcome])
    assert shared.limit == pytest.approx(5.6)
    assert shared.reached
    outcome.add("ours-shared", Round({"p99_ms": 5.9, "trip_ms": 0.2}))
    assert not verdicts([outcome])[0].reached


@pytest.mark.ci
def test_a_lock_that_excludes_nobody_is_found_out() -> None:
    left = list(EXCLUDING)
    for _ in range(10):  # these runs are short: on a busy machine two may not have met in one of them
        outcomes, _ = run(" ".join(left), "no-lock")
        assert [outcome.scenario.key for outcome in outcomes] == left
        for outcome in outcomes:
            assert outcome.failures == []
            assert all(text.startswith(f"{outcome.scenario.key}, no-lock: ") for text in outcome.violations)
            if outcome.violations:
                left.remove(outcome.scenario.key)
        if not left:
            break
    assert not left


def test_a_grant_before_the_holders_end_is_found_out() -> None:
    from benchmarks.scenarios.crash import judge

    assert judge([100 * MS, 200 * MS], [103 * MS, 205 * MS]).violations == []
    found = judge([100 * MS, 200 * MS, 300 * MS], [90 * MS, 204 * MS, 0])
    assert found.violations == ["granted 10.0 ms before the killed holder's lease ended"]
    assert found.figures == {"late_ms": 4.0, "latest_ms": math.inf, "never": 1}


def test_overlaps() -> None:
    assert overlaps([[(0, 1, 2), (2, 5, 6)], [(0, 2, 5)]]) == []
    assert overlaps([[(0, 1000, 9000)], [(0, 2000, 3000)], [(0, 4000, 5000)]]) == [
        "tasks 0 and 1 held the lock together for 1.0 µs",
        "tasks 0 and 2 held the lock together for 1.0 µs",
    ]
    assert overlaps([[(0, 0, 10)] for _ in range(9)])[-1] == "… 8 overlaps in all"
    assert peak([[(0, 1000, 9000)], [(0, 2000, 3000)], [(0, 3000, 5000)]]) == 2
    assert peak([]) == 0
    assert miscounted(3, 3) == []
    assert miscounted(2, 3) == ["the counter says 2 after 3 grants: updates were lost"]


def test_a_reader_beside_a_writer_is_found_out() -> None:
    writer = [[(0, 10, 20), (20, 30, 40)]]
    assert torn([[(0, 0, 10), (10, 20, 30), (30, 40, 50)], [(0, 5, 10)]], writer) == []
    for got, released in ((0, 11), (12, 15), (19, 25), (25, 31), (5, 45)):
        assert torn([[(0, got, released)]], writer) == ["1 times a reader and a writer were in together"]
    assert len(torn([], [*writer, [(0, 15, 25)]])) == 1


def test_more_holders_than_permits_fail_the_run_when_they_are_ours() -> None:
    assert crowded(BY_NAME["ours"], 6, 5) == ["6 held the 5 permits at one moment"]
    assert crowded(BY_NAME["ours"], 5, 5) == crowded(BY_NAME["sorted-set"], 9, 5) == []


def test_figures_of_a_contest() -> None:
    found = contest([[(0, 1 * MS, 2 * MS), (2 * MS, 9 * MS, 9 * MS)], [(0, 12 * MS, 13 * MS)]], 0, 10 * MS)

    assert found.grants == 2
    assert found.per_second == pytest.approx(200)
    assert found.jain == pytest.approx(0.5)
    assert found.fair_per_second == pytest.approx(100)
    assert found.starved == 1
    assert found.max_wait == found.p99_wait == pytest.approx(0.010)
    assert jain([5, 5, 5]) == 1
    assert jain([0, 0]) == 0


def test_only_grants_to_the_other_process_are_hand_overs() -> None:
    assert handovers([[(0, 0, 5000), (5000, 6000, 7000)], [(0, 9000, 9500)]]) == [2.0]
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile([], 0.5) == math.inf


def test_figures_are_put_into_a_page(tmp_path: Path) -> None:
    outcome = Outcome(scenarios.BY_KEY["s1"])
    for value in (1.0, 3.0, 2.0):
        outcome.add("ours", Round({"pairs_per_second": 1000 * value, "commands_per_pair": value}))
    about = {
        "server": "Valkey 9",
        "transport": "TCP",
        "python": "3.11",
        "loop": "asyncio",
        "platform": "here",
        "rounds": 3,
    }
    about["packages"] = {"redis": "8.1"}
    document = tmp_path / "some-page.md"
    begin, end = page.BEGIN.format("locks"), page.END.format("locks")
    other = [page.BEGIN.format("more"), "stays", page.END.format("more")]
    document.write_text("\n".join(["# Title", "", *other, begin, "of old", end, "", "and so on", ""]))

    for _ in range(2):
        page.put(document, "locks", [outcome], [Verdict("s1", "commands", 2, 2, at_least=False)], about)
        lines = document.read_text().splitlines()
        assert lines[:6] == ["# Title", "", *other, begin]
        assert lines[-3:] == [end, "", "and so on"]
        assert any(line.startswith("| ours | 2,000 | 2.00 |") for line in lines)
        assert "| ≤ 2 commands |  | 2 | reached |" in lines
        assert "of old" not in lines
    with pytest.raises(ValueError, match="some-page"):
        page.put(document, "semaphores", [outcome], [], about)
    document.write_text(f"{end} {begin}")
    with pytest.raises(ValueError, match="some-page"):
        page.put(document, "locks", [outcome], [], about)


def test_figures_that_were_written_can_be_read_again(tmp_path: Path) -> None:
    outcomes = [Outcome(scenarios.BY_KEY["s1"]), Outcome(scenarios.BY_KEY["s7"])]
    for value in (1.0, 3.0):
        outcomes[0].add("ours", Round({"pairs_per_second": value, "commands_per_pair": 2 * value}))
        outcomes[0].add("redis-py", Round({"pairs_per_second": value, "commands_per_pair": value}))
        outcomes[1].add("ours", Round({"late_ms": math.inf}))
    [path] = write(tmp_path, outcomes, [], {"rounds": 2}, plot=False)

    found, about = saved(path, [one.scenario for one in outcomes], ["redis-py", "ours"])
    assert [outcome.figures for outcome in found] == [outcome.figures for outcome in outcomes]
    assert list(found[0].figures) == ["redis-py", "ours"]
    assert about == {"rounds": 2}
    [alone] = saved(path, [outcomes[1].scenario], ["redis-py"])[0]
    assert alone.figures == {}
    with pytest.raises(KeyError):
        saved(path, [scenarios.BY_KEY["s2"]], ["ours"])


def test_verdicts() -> None:
    assert Verdict("s1", "commands", 2.004, 2, at_least=False, slack=0.005).reached
    assert not Verdict("s1", "commands", 2.01, 2, at_least=False, slack=0.005).reached
    assert Verdict("s1", "times", 1.8, 1.8, at_least=True).reached
    assert not Verdict("s1", "times", 1.799, 1.8, at_least=True).reached
    assert not Verdict("s7", "ms", math.inf, 5, at_least=False).reached


def test_pictures_name_everything_in_plain_words() -> None:
    """Every contestant and every scenario has words, and the committed pictures have no inner codes."""
    assert set(LABELS) == set(BY_NAME)
    assert set(WORDS) == set(scenarios.BY_KEY)
    codes = re.compile(r"\bS\d\b|fair/s|\bours\b|\bhop\b|\bp99\b|\bs\dw?ork\b")
    for name in PICTURES:
        path = DOCS / f"{name}.svg"
        if path.exists():
            texts = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text("utf-8"))
            assert len(texts) > 20
            assert [text for text in texts if codes.search(text)] == []
            assert any("better" in text for text in texts)


@pytest.mark.ci
def test_bars_start_at_zero_and_the_longest_is_cut_visibly(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it comes with the group benchmarks")

    def bar(label: str, value: float) -> Bar:
        return Bar(label, "peer", value, f"{value:g}", value, value)

    panel = Panel("Waiting", "seconds", "less", [bar("short", 100), bar("longer", 250), bar("very long", 99_999)])
    [path] = draw([panel], "Title", tmp_path / "picture", ["svg"])
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text("utf-8"))
    assert texts[:3] == ["0", "100", "200"]
    assert {"99999 (bar cut)", "250", "(shorter bars are better)", "very long"} <= set(texts)


@pytest.mark.real
async def test_what_locks_take_is_measured(server: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
    await footprint.run(server.url, 20, 50)
    printed = capsys.readouterr().out
    assert "50 names that were used: " in printed
    assert "25 held names: " in printed
    assert {"{m:queue}:queue", "m:held", "{m:gate}:gate"} <= set(re.findall(r"(?m)^(\S+) +[\d,]+ bytes, for ", printed))
    assert re.findall(r"(?m)^(\w+: [\w ]+?) +[\d.]+ scripts, ", printed) == [
        *(f"{kind}: {what}" for kind in ("lock", "semaphore") for what in ("acquire", "renew", "release")),
        *("lock: wait in a queue", "lock: hand over"),
    ]
    assert re.findall(r"(?m)^([\w ]+): \d+ us$", printed) == [
        *("no observer", "one that does nothing", "Prometheus", "OpenTelemetry"),
    ]
