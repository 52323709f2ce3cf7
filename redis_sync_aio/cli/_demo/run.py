"""The reports of the workers of a run: their leases, and the kill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MS = 1_000_000  # nanoseconds


@dataclass(slots=True)
class ReportedGrant:
    """One lease as its worker told of it; times are `time.monotonic_ns`."""

    process: int
    task: int
    product: int
    fence: int
    asked: int
    got: int
    released: int | None = None  # when it began to release; None: not told
    item: int = 0  # what was sold; 0: nothing, the product was sold out


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock that was held when a worker was killed."""

    product: int
    fence: int
    ends: int  # when its lease ends


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a worker that held a lock."""

    process: int
    product: int
    at: int
    seen: tuple[Seen, ...]


@dataclass
class Run:
    """The reports of the workers."""

    started: int
    ended: int
    locked: bool
    timeout: float  # seconds until a wait is given up
    grants: list[ReportedGrant]
    gave_up: int
    kill: Kill | None

    @cached_property
    def by_product(self) -> Mapping[int, Sequence[ReportedGrant]]:
        """The grants of each product, in order of time."""
        found: dict[int, list[ReportedGrant]] = defaultdict(list)
        for grant in sorted(self.grants, key=lambda grant: grant.got):
            found[grant.product].append(grant)
        return found

    @cached_property
    def orphans(self) -> Mapping[int, Orphan]:
        """The locks that the killed worker took with it, by product."""
        kill = self.kill
        if kill is None:
            return {}
        survived = {(g.product, g.fence) for g in self.grants if g.process != kill.process}
        found = {}
        for seen in kill.seen:
            after = [g.got for g in self.by_product[seen.product] if g.got > kill.at]
            orphan = Orphan(seen.fence, seen.ends, after[0] if after else None)
            # Held by nobody who lived, yet given up early: by a waiter whose time was up just then.
            given_back = orphan.early and seen.product != kill.product
            if (seen.product, seen.fence) not in survived and not given_back:
                found[seen.product] = orphan
        return found

    def held_until(self, grant: ReportedGrant) -> int | None:
        """Return when the section of ``grant`` ended, by its release or by death; None if that is not known."""
        if grant.released is None and self.kill is not None:
            orphan = self.orphans.get(grant.product)
            if orphan is not None and orphan.fence == grant.fence:
                return self.kill.at
        return grant.released


@dataclass(frozen=True, slots=True)
class Orphan:
    """A lock whose holder was killed."""

    fence: int
    ends: int  # when the dead holder's lease ends
    next: int | None  # when somebody had it again

    @property
    def early(self) -> bool:
        """Whether somebody had it before the dead holder's lease ended (told in milliseconds, so not exactly)."""
        return self.next is not None and self.next < self.ends - 20 * MS
