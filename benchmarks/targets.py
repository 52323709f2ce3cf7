"""The targets, and whether this run reached them. Every ratio is between figures of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .contestants import BY_NAME
from .scenario import Outcome
from .scenarios.permits import PERMITS

OURS, SHARED, LINGERING = "ours", "ours-shared", "ours-lingering"
SLICE_MS = 5
"""The longest time that a process hands a grant on while another one waits, in milliseconds."""
RARE = 0.005


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and the measured value."""

    scenario: str
    text: str
    value: float
    limit: float
    at_least: bool
    compared_with: str = ""
    slack: float = 0.0
    """Tolerance for counts per pair: a rare extra command (a check of an expired lease, a liveness test) is no miss."""

    @property
    def reached(self) -> bool:
        """Whether the target was reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit + self.slack


@dataclass(frozen=True, slots=True)
class Judge:
    """Makes verdicts about one scenario; targets that this run did not measure are left out."""

    outcome: Outcome

    def limit(self, key: str, text: str, most: float, slack: float = 0.0, of: str = OURS) -> Iterator[Verdict]:
        """Require our figure, or that ``of`` another variant of ours, to be at most ``most``."""
        value = self.outcome.figure(of, key)
        if value is not None:
            yield Verdict(self.outcome.scenario.key, text, value, most, False, slack=slack)

    def floor(self, key: str, text: str, least: float, of: str = OURS) -> Iterator[Verdict]:
        """Require it to be at least ``least``."""
        value = self.outcome.figure(of, key)
        if value is not None:
            yield Verdict(self.outcome.scenario.key, text, value, least, True)

    def faster(self, key: str, text: str, than: str | None, least: float, of: str = OURS) -> Iterator[Verdict]:
        """Require it to be at least ``least`` times theirs."""
        value = self._ratio(key, than, of)
        if value is not None:
            yield Verdict(self.outcome.scenario.key, text, value, least, True, than or "")

    def shorter(self, key: str, text: str, than: str | None, most: float, of: str = OURS) -> Iterator[Verdict]:
        """Require it to be at most ``most`` times theirs."""
        value = self._ratio(key, than, of)
        if value is not None:
            yield Verdict(self.outcome.scenario.key, text, value, most, False, than or "")

    def _ratio(self, key: str, than: str | None, of: str = OURS) -> float | None:
        ours, theirs = self.outcome.figure(of, key), self.outcome.figure(than, key) if than else None
        return None if ours is None or not theirs else ours / theirs

    def best(self, key: str, choose: Callable[..., str], peak: float = math.inf) -> str | None:
        """Return the peer whose figure is best, by ``max`` or ``min``; those with a greater peak do not count."""
        peers = {
            name: value
            for name in self.outcome.figures
            if BY_NAME[name].kind == "peer"
            and (value := self.outcome.figure(name, key)) is not None
            and (self.outcome.figure(name, "peak") or 0) <= peak
        }
        return choose(peers, key=lambda name: peers[name]) if peers else None


def _one(judge: Judge) -> Iterator[Verdict]:
    yield from judge.faster("pairs_per_second", "times redis-py's Lock", "redis-py", 1.8)
    yield from judge.limit("commands_per_pair", "commands a pair", 2, RARE)
    yield from judge.limit("reads_per_pair", "server reads a pair", 2, RARE)
    yield from judge.faster("pairs_per_second", "times redis-py's Lock (ours-lingering)", "redis-py", 25, LINGERING)


def _many(judge: Judge) -> Iterator[Verdict]:
    yield from judge.faster("pairs_per_second", "times redis-py's Lock", "redis-py", 8)
    for least in (0.5, 0.6):
        yield from judge.faster("pairs_per_second", "times the bare protocol", "raw-protocol", least)
    yield from judge.limit("reads_per_pair", "server reads a pair", 0.05)
    yield from judge.faster("pairs_per_second", "times redis-py's Lock (ours-lingering)", "redis-py", 15, LINGERING)


def _contest(judge: Judge) -> Iterator[Verdict]:
    fair = judge.best("fair_per_second", max)
    yield from judge.faster("fair_per_second", "times the best fair peer, fair/s", fair, 2.5)
    yield from judge.floor("jain", "Jain index", 0.99)
    yield from judge.limit("commands_per_grant", "commands a grant", 2, RARE)
    yield from judge.limit("max_wait_ms", "ms longest wait", 20)
    yield from judge.faster("fair_per_second", "times the best fair peer, fair/s (ours-shared)", fair, 25, SHARED)
    yield from judge.floor("jain", "Jain index (ours-shared)", 0.99, SHARED)
    yield from judge.limit("max_wait_ms", "ms longest wait (ours-shared)", 10, of=SHARED)
    yield from judge.limit("reads_per_grant", "server reads a grant (ours-shared)", 0.1, of=SHARED)


def _contest_with_work(judge: Judge) -> Iterator[Verdict]:
    fair, raw = judge.best("fair_per_second", max), judge.best("grants_per_second", max)
    yield from judge.faster("fair_per_second", "times the best fair peer, fair/s", fair, 1.2)
    yield from judge.faster("grants_per_second", "times the best raw rate, grants/s", raw, 0.95)
    yield from judge.faster("fair_per_second", "times the strict order, fair/s (ours-shared)", OURS, 1, SHARED)
    yield from judge.shorter("p99_wait_ms", "times the strict order, p99 wait (ours-shared)", OURS, 1.1, SHARED)


def _contest_in_one(judge: Judge) -> Iterator[Verdict]:
    text = "times asyncio.Lock, fair/s (ours-shared)"
    yield from judge.faster("fair_per_second", text, "asyncio-lock", 0.9, SHARED)


def _lone(judge: Judge) -> Iterator[Verdict]:
    trip = judge.outcome.figure(SHARED, "trip_ms")  # in the strict order all 64 tasks are ahead of it
    if trip is not None:
        text = f"ms wait of the lone task, p99: slice and 3 round trips of {trip:.2f} ms ({SHARED})"
        yield from judge.limit("p99_ms", text, SLICE_MS + 3 * trip, of=SHARED)


def _handover(judge: Judge) -> Iterator[Verdict]:
    yield from judge.shorter("p50_us", "times the best peer, p50", judge.best("p50_us", min), 0.6)
    yield from judge.shorter("p50_us", "times the hop, p50", "hop", 2.5)


def _waiting(judge: Judge) -> Iterator[Verdict]:
    yield from judge.limit("commands_per_second", "commands/s while waiting", 1)
    yield from judge.limit("connections", "connections of the process", 2)
    yield from judge.limit("drain_ms", "ms to drain 100", 10)


def _cancellation(judge: Judge) -> Iterator[Verdict]:
    yield from judge.limit("stuck", "keys stuck", 0)
    yield from judge.limit("ignored", "cancellations ignored", 0)
    yield from judge.limit("left", "queue entries left", 0)
    yield from judge.limit("usable_ms", "ms until all keys are usable", 1)


def _crash(judge: Judge) -> Iterator[Verdict]:
    yield from judge.limit("late_ms", "ms past expiry", 5)


def _share(least: float, least_shared: float, judge: Judge) -> Iterator[Verdict]:
    fair = judge.best("fair_per_second", max, peak=PERMITS)
    yield from judge.faster("fair_per_second", "times the best fair peer that keeps the limit, fair/s", fair, least)
    if least_shared:
        text = "times the best fair peer that keeps the limit, fair/s (ours-shared)"
        yield from judge.faster("fair_per_second", text, fair, least_shared, SHARED)
    for of, ending in ((OURS, ""), (SHARED, " (ours-shared)")):
        yield from judge.limit("peak", f"holders at one moment{ending}", PERMITS, of=of)
    yield from judge.floor("jain", "Jain index", 0.99)


def _many_semaphores(judge: Judge) -> Iterator[Verdict]:
    yield from judge.faster("pairs_per_second", "times redis-py's Lock", "redis-py", 6)


def _waiting_for_permits(judge: Judge) -> Iterator[Verdict]:
    yield from judge.limit("commands_per_second", "commands/s while waiting", 1)
    yield from judge.limit("connections", "connections of the process", 2)


def _cost(judge: Judge) -> Iterator[Verdict]:
    few, many = judge.outcome.figure(OURS, "script_few"), judge.outcome.figure(OURS, "script_many")
    if few and many:
        text = "times the server's time for a script with 10 permits held, with 100,000"
        yield Verdict(judge.outcome.scenario.key, text, many / few, 2, False)


def _read_mostly(judge: Judge) -> Iterator[Verdict]:
    yield from judge.faster("grants_per_second", "times the same on AsyncLock", "ours-lock", 5)


def _market(judge: Judge) -> Iterator[Verdict]:
    yield from judge.faster("bought_per_second", "times the purchases/s of plain WATCH", "redis-py", 5)
    yield from judge.faster("listed_per_second", "times the listings/s of plain WATCH", "redis-py", 0.6)
    yield from judge.faster("bought_per_second", "times the purchases/s of the fine lock", "fine-lock", 0.8)
    for key, least, what in (("bought_per_second", 5, "purchases/s"), ("listed_per_second", 0.6, "listings/s")):
        text = f"times the {what} of plain WATCH, on the same key (ours-coarse)"
        yield from judge.faster(key, text, "redis-py", least, "ours-coarse")


def _one_seller(judge: Judge) -> Iterator[Verdict]:
    yield from judge.limit("p99_ms", "ms a purchase, p99", 20)


def _transaction(judge: Judge) -> Iterator[Verdict]:
    yield from judge.shorter("us", "times the time of redis-py's transaction()", "redis-py", 1.1)


def _guarded(judge: Judge) -> Iterator[Verdict]:
    ours, theirs = judge.outcome.figure(OURS, "reads"), judge.outcome.figure("redis-py", "reads")
    if ours and theirs:
        text = "round trips more than a MULTI without a guard"
        yield Verdict(judge.outcome.scenario.key, text, ours - theirs, 1, False, "redis-py", slack=RARE)


_JUDGES: Mapping[str, Callable[[Judge], Iterator[Verdict]]] = {
    "s1": _one,
    "s2": _many,
    "s3": _contest,
    "s3work": _contest_with_work,
    "s3one": _contest_in_one,
    "lone": _lone,
    "handover": _handover,
    "s4": _waiting,
    "s6": _cancellation,
    "s7": _crash,
    "s5": partial(_share, 4, 25),
    "s5work": partial(_share, 1.4, 0),
    "s2sem": _many_semaphores,
    "s4sem": _waiting_for_permits,
    "cost": _cost,
    "rw": _read_mostly,
    "s8": _market,
    "s8s1b5": _one_seller,
    "tx": _transaction,
    "guarded": _guarded,
}


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return a verdict for each target that this run measured."""
    judged = ((_JUDGES.get(outcome.scenario.key), outcome) for outcome in outcomes)
    return [verdict for judge, outcome in judged if judge is not None for verdict in judge(Judge(outcome))]
