"""What is to be true of a run, looked up in what the resource and the workers have written down."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

US = 1_000_000


def text(word: str | bytes) -> str:
    return word if isinstance(word, str) else word.decode()


@dataclass(frozen=True)
class Commit:
    """A write that the resource took, in its order. ``at``: just before it was sent; the lease was held then.

    ``kind``: "begin" or "end" of a section; "late": written although the lease was known to be lost.
    """

    kind: str
    fence: int
    token: str
    at: int
    worker: int

    @classmethod
    def read(cls, line: str | bytes) -> Self:
        kind, fence, token, at, worker = line.split()
        return cls(text(kind), int(fence), text(token), int(at), int(worker))


@dataclass(frozen=True)
class Death:
    """A worker was killed; ``held``: the locks that were its own by then, as the server tells.

    ``doom``: where it died; "between": what it was given after it was killed and before the server knew.
    """

    worker: int
    at: int
    doom: str
    held: frozenset[str]


def percentile(values: list[float], share: float = 0.99) -> float:
    """Return the value that ``share`` of ``values`` do not exceed; 0 if there are none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0.0


@dataclass
class History:
    """A run that is over."""

    commits: dict[str, list[Commit]]
    told: list[dict[str, Any]]
    deaths: list[Death]

    def __post_init__(self) -> None:
        self.errors = [what for what in self.told if "error" in what]
        self.losses = [what for what in self.told if "lost" in what]
        self.too_late = sum(bool(loss["too_late"]) for loss in self.losses)
        self.refusals = [what for what in self.told if "refused" in what]
        self.sections = sum(commit.kind == "end" for log in self.commits.values() for commit in log)

    def last_fence(self, name: str) -> int:
        return max((commit.fence for commit in self.commits[name]), default=0)

    # -- exclusion and fences --------------------------------------------------------------------------

    def overlaps(self) -> list[str]:
        """P1: a lease that was still held when a greater fence was granted, or had been used."""
        found = [f"refused while held: {refusal}" for refusal in self.refusals if refusal["held"]]
        for name, log in self.commits.items():
            for one, following in itertools.pairwise(log):
                if _overlap(one, following):
                    found.append(f"{name}: {following} was granted while {one}")
        return found

    def stale(self) -> list[str]:
        """P8: fences that did not rise."""
        found: list[str] = []
        for name, log in self.commits.items():
            for one, following in itertools.pairwise(log):
                same = following.fence == one.fence and following.token == one.token and following.kind != "begin"
                if not (following.fence > one.fence or same):
                    found.append(f"{name}: {following} after {one}")
        for refusal in self.refusals:
            if refusal["newer"] == refusal["fence"]:
                found.append(f"the same fence twice: {refusal}")
            elif refusal["since"] < refusal["asked"]:
                found.append(f"not greater than one that was in use before the request: {refusal}")
        return found

    # -- progress --------------------------------------------------------------------------------------

    def waits(self) -> list[tuple[float, int, str]]:
        """Return how long each lock was unused after a section's end, longest first: (seconds, until, name)."""
        found: list[tuple[float, int, str]] = []
        for name, log in self.commits.items():
            for one, following in itertools.pairwise(log):
                if one.kind == "end" and following.kind == "begin":
                    found.append(((following.at - one.at) / US, following.at, name))
        return sorted(found, reverse=True)

    def first_grants(self, back: list[int]) -> list[float]:
        """Return how long after each return of the server each lock was granted; from its release, if it was held."""
        found: list[float] = []
        for log in self.commits.values():
            for at, until in itertools.pairwise([*back, max(commit.at for commit in log)]):
                for one, following in itertools.pairwise(log):
                    if at < following.at and following.kind == "begin":
                        ended = one.at if one.kind == "end" else at
                        found.append((min(following.at, until) - max(at, ended)) / US)
                        break
        return found

    def after_deaths(self) -> list[float]:
        """Return for each lock of a holder that was killed after how many seconds the next one had it.

        A next one that was killed before it could do anything with the lock counts for itself.
        """
        found: list[float] = []
        for name, log in self.commits.items():
            begins = [commit.at for commit in log if commit.kind == "begin"]
            deaths = sorted(death.at for death in self.deaths if name in death.held)
            for at, until in itertools.pairwise([*deaths, math.inf]):
                following = next((begin for begin in begins if begin > at), math.inf)
                if following < until:
                    found.append((following - at) / US)
        return found


def _overlap(one: Commit, following: Commit) -> bool:
    """Return whether ``one`` was held when ``following`` was granted. This misses rather than accuses.

    A fence is the server's time at the grant, or later. Tasks that share what their process holds have the same token,
    and fences that were reserved with the grant to the process: there the first has to end before the next begins.
    """
    if one.token == following.token and one.fence != following.fence:
        return one.kind == following.kind == "begin"
    return one.kind != "late" and one.fence < following.fence < one.at
