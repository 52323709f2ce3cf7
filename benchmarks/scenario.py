"""What a scenario is: its columns, its rounds, the scale it is played at, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .contestant import Contestant, Game, Kind
from .measure import middle
from .server_stats import Cost, ServerStats
from .workers import Job, Pool, Worker


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run; times in seconds.

    Attributes:
        pairs: measured time of S1 and S2, and of transactions; contest: of S3; share: of S5 and of readers and writers;
            alternate: of the hand-over; idle: of S4; market: of S8.
        warm_up: unmeasured time before those that need it.
        crash_keys, crash_limit: locks per killed process, and how long to wait for the next grant.
        everybody: whether contestants take part that a quick run of the scenario leaves out.
    """

    rounds: int
    pairs: float
    contest: float
    share: float
    alternate: float
    idle: float
    market: float
    waiters: int
    cancels: int
    crash_keys: int
    crash_limit: float
    everybody: bool = True


QUICK = Scale(3, 0.2, 0.4, 0.3, 0.4, 0.2, 0.3, 100, 500, 5, 1.5)


FULL = Scale(5, 1.0, 2.0, 1.5, 2.0, 5.0, 5.0, 100, 500, 5, 4.0)


SMOKE = Scale(1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 10, 40, 2, 1.5)


@dataclass(slots=True)
class Round:
    """The result of one contestant in one round: figures and violations."""

    figures: dict[str, float]
    violations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Bench:
    """The environment of a scenario: the server, the workers, the scale."""

    url: str
    stats: ServerStats
    pool: Pool
    scale: Scale

    def start(self, jobs: Sequence[Job], **arguments: Any) -> list[Worker]:
        """Start one job in each worker; with ``side=`` 0, 1 … when there are several."""
        self.pool.clear()
        workers = self.pool.workers()[: len(jobs)]
        for side, (worker, job) in enumerate(zip(workers, jobs, strict=True)):
            worker.start(self.url, job, **arguments, **({"side": side} if len(jobs) > 1 else {}))
        return workers

    def meet(self, workers: Sequence[Worker], at: Callable[[], None] = lambda: None) -> None:
        """Wait until all workers are at their barrier, call ``at``, let them go on."""
        for worker in workers:
            worker.met()
        at()
        for worker in workers:
            worker.go()

    def run(self, contestant: type[Contestant], jobs: Sequence[Job], **arguments: Any) -> tuple[list[Any], Cost]:
        """Run jobs that meet twice, before and after the measurement; return results and the server's cost."""
        workers = self.start(jobs, contestant=contestant.name, **arguments)
        looks: list[Any] = []
        for _ in range(2):
            self.meet(workers, lambda: looks.append(self.stats.look()))
        return [worker.result() for worker in workers], contestant.sends.cost(*looks)


@dataclass(frozen=True, slots=True)
class Column:
    """A figure as it is shown: the median of the rounds, or with ``most`` the maximum."""

    key: str
    title: str
    digits: int = 0
    most: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One measurement, made of every contestant in every round.

    Attributes:
        kinds: the contestants that may take part.
        refuses: contestants that cannot, and why.
        proof: whether ``play`` would notice a lock that does not exclude; if not, that is checked beforehand.
        chart: the column to plot.
        game: the primitive it needs; a contestant lists the games it plays.
        quick: whether a quick run includes it.
    """

    key: str
    title: str
    play: Callable[[Bench, type[Contestant]], Round]
    columns: tuple[Column, ...]
    chart: str
    kinds: tuple[Kind, ...] = ("ours", "peer", "broken")
    refuses: Mapping[str, str] = field(default_factory=dict)
    proof: bool = True
    game: Game = "locks"
    quick: bool = True


Figures: TypeAlias = dict[str, list[float]]


@dataclass(slots=True)
class Outcome:
    """All rounds of one scenario."""

    scenario: Scenario
    figures: dict[str, Figures] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, played: Round) -> None:
        """Record one round."""
        mine = self.figures.setdefault(name, {})
        for key, value in played.figures.items():
            mine.setdefault(key, []).append(value)
        self.violations += [f"{self.scenario.key}, {name}: {text}" for text in played.violations]

    def figure(self, name: str, key: str) -> float | None:
        """Return the median over the rounds, or the maximum if the column says so; None if there is none."""
        values = self.figures.get(name, {}).get(key)
        if not values:
            return None
        return (
            max(values) if any(column.most for column in self.scenario.columns if column.key == key) else middle(values)
        )


Progress: TypeAlias = Callable[[str], None]
