"""The reports of the workers of a run: their leases, and the kill."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise

from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator

from .._session import counted

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


# -- The audit of the data in Redis, and the figures of the workers --------------------------------------------


@dataclass(frozen=True, slots=True)
class Sale:
    """One entry of a list of sales."""

    item: int
    fence: int

    @classmethod
    def parse(cls, entry: str) -> Sale:
        """Read an entry as a worker wrote it: "item fence process task"."""
        item, fence, _process, _task = entry.split()
        return cls(int(item), int(fence))


@dataclass
class Audit:
    """The books, from the data in Redis alone: whatever the workers believe does not count."""

    stocked: int = 0
    sold: int = 0
    left: int = 0  # still in stock when everybody had gone
    lost: int = 0  # neither sold nor in stock
    twice: int = 0  # sales of an item that was sold before
    oversold: int = 0  # sales beyond what there was
    disorder: int = 0  # sales under a fence that is not greater than the one before
    fenced: bool = True

    def add(self, stocked: int, left: int, sales: Sequence[Sale]) -> None:
        """Check one product: items are numbered ``stocked`` to 1, in the order in which they are sold."""
        items = {sale.item for sale in sales}
        self.stocked += stocked
        self.sold += len(sales)
        self.left += max(left, 0)
        self.lost += len(set(range(max(left, 0) + 1, stocked + 1)) - items)
        self.twice += len(sales) - len(items)
        self.oversold += max(0, len(sales) - stocked)
        if self.fenced:
            self.disorder += sum(b.fence <= a.fence for a, b in pairwise(sales))


def faults(audit: Audit, figures: Figures) -> list[str]:
    """Return what went wrong, in words; nothing if all is well."""
    found = [
        (audit.left, "left unsold"),
        (audit.lost, "lost (neither sold nor in stock)"),
        (audit.twice, "sold twice"),
        (audit.oversold, "oversold (more sales than stock)"),
    ]
    counts = [
        (audit.disorder, "fence", "out of order"),
        (figures.overlaps, "time", "two workers were in the same section"),
        (figures.early, "lock", "granted before the killed holder's lease had ended"),
    ]
    sales = [f"{count:,} {what}" for count, what in found if count]
    return sales + [f"{counted(count, one)} {what}" for count, one, what in counts if count]


def percentile(values: Sequence[int], percent: float) -> int:
    """Return the smallest of ``values`` that ``percent`` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def jain(counts: Sequence[int]) -> float:
    """Return Jain's fairness index: 1.0 when all are equal, 1/n when one has everything."""
    total = sum(counts)
    return total * total / (len(counts) * sum(count * count for count in counts)) if total else math.nan


@dataclass
class Figures:
    """The figures of a run; durations in nanoseconds."""

    grants: int
    idle: int  # grants under which there was nothing to sell
    seconds: float
    overlaps: int  # times that two were in one section
    early: int  # locks of the killed worker that somebody had before its lease ended
    waits: list[int]
    handovers: list[int] = field(default_factory=list)
    fairness: float = math.nan


def measure(run: Run) -> Figures:
    """Compute the figures of ``run``."""
    figures = Figures(
        grants=len(run.grants),
        idle=sum(grant.item == 0 and grant.released is not None for grant in run.grants),
        seconds=(run.ended - run.started) / 1e9,
        overlaps=sum(_overlaps(run, grants) for grants in run.by_product.values()),
        early=sum(orphan.early for orphan in run.orphans.values()),
        waits=[grant.got - grant.asked for grant in run.grants],
    )
    if run.locked:
        figures.handovers = [gap for grants in run.by_product.values() for gap in _handovers(grants)]
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for grant in run.grants:
        if run.kill is None or grant.process != run.kill.process:
            counts[grant.process, grant.task] += 1
    figures.fairness = jain(list(counts.values()))
    return figures


def _overlaps(run: Run, grants: Sequence[ReportedGrant]) -> int:
    """Count the sections that began before an earlier one had ended."""
    found, busy = 0, 0
    for grant in grants:
        found += grant.got < busy
        busy = max(busy, run.held_until(grant) or 0)
    return found


def _handovers(grants: Sequence[ReportedGrant]) -> Iterator[int]:
    """From a release to the start of the next holder, in another process, that was waiting for it."""
    for one, other in pairwise(grants):
        if one.released is not None and other.process != one.process and other.asked < one.released:
            yield other.got - one.released


# -- A worker process of the demo: tasks that sell items, each under the lock of its product -------------------
#
# Started as ``python -m redis_sync_aio.cli._demo.run``. It reads its job, one line of JSON, from stdin, answers
# "ready", and starts at the next line. It ends when stdin does, since then the parent is gone. What happens it
# writes to stdout, one JSON array per line and immediately, so that a worker that is killed has told everything up
# to then. Times are `time.monotonic_ns`, which is one clock for all processes of a machine.


KEEP = 3600
"""Seconds after which the demo's data is gone from the server even if nobody could delete it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a worker."""

    url: str
    prefix: str
    process: int
    tasks: int
    products: int
    work: float  # seconds that a sale takes between reading the stock and writing it
    timeout: float  # seconds to wait for a lock before trying another product
    ttl: float
    seed: int
    locked: bool  # False: sell without the lock, to show what happens then
    freeze_at: int  # the sale in which to stop, holding the lock, and wait to be killed; 0: none

    def line(self) -> bytes:
        """Return the job as the line that a worker reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


def stock_key(prefix: str, product: int) -> str:
    """Return the key of the number of items left."""
    return f"{prefix}:stock:{product}"


def sales_key(prefix: str, product: int) -> str:
    """Return the key of the list of sales: "item fence process task", in order."""
    return f"{prefix}:sales:{product}"


def lock_name(prefix: str, product: int) -> str:
    """Return the name of the product's lock."""
    return f"{prefix}:lock:{product}"


def tell(kind: str, *values: int) -> None:
    """Tell the parent. One write: the line arrives whole or not at all."""
    os.write(1, json.dumps([kind, *values]).encode() + b"\n")


class Shop:
    """The tasks of one worker and what they share."""

    def __init__(self, job: Job, redis: Redis, sync: Coordinator) -> None:
        self._job = job
        self._redis = redis
        self._locks = {
            product: AsyncLock(sync, lock_name(job.prefix, product), ttl=job.ttl)
            for product in range(1, job.products + 1)
        }
        self._grants = 0
        self._sales = 0

    async def connect(self) -> None:
        """Open the connections, so that no grant pays for it."""
        await asyncio.gather(*(self._redis.ping() for _ in range(self._job.tasks)))
        await self._locks[1].locked()

    async def run(self) -> None:
        """Sell until nothing is left."""
        async with asyncio.TaskGroup() as group:
            for task in range(1, self._job.tasks + 1):
                group.create_task(self._sell_everything(task))

    async def _sell_everything(self, task: int) -> None:
        """Go round the products, in an order of this task's own, until all are sold out."""
        products = list(self._locks)
        random.Random(f"{self._job.seed} {self._job.process} {task}").shuffle(products)
        while products:
            for product in products.copy():
                asked = time.monotonic_ns()
                try:
                    if not await self._sell_one(task, product, asked):
                        products.remove(product)
                except AcquireTimeout:
                    tell("gave up", task, product, asked, time.monotonic_ns())

    async def _sell_one(self, task: int, product: int, asked: int) -> bool:
        """Sell one item; return False if none was left."""
        async with self._turn(product) as fence:
            got = time.monotonic_ns()
            self._grants = grant = self._grants + 1
            tell("got", grant, task, product, fence, asked, got)
            item = int(await self._redis.get(stock_key(self._job.prefix, product)) or 0)
            if item > 0:
                await asyncio.sleep(self._job.work)  # everything that others could do meanwhile
                await self._freeze_if_due(grant)
                await self._write_sale(task, product, item, fence)
            released = time.monotonic_ns()
        tell("end", grant, released, max(item, 0))
        return item > 0

    @asynccontextmanager
    async def _turn(self, product: int) -> AsyncIterator[int]:
        if not self._job.locked:
            yield 0
            return
        async with self._locks[product].acquire(timeout=self._job.timeout) as lease:
            yield lease.fence

    async def _freeze_if_due(self, grant: int) -> None:
        """Stop in the middle of the section, with the lock held and nothing written, and wait to be killed."""
        self._sales += 1
        if self._sales == self._job.freeze_at:
            tell("frozen", grant)
            await asyncio.Event().wait()

    async def _write_sale(self, task: int, product: int, item: int, fence: int) -> None:
        # In one MULTI, since other tasks of a worker that is killed are just here: its last sales are then
        # written whole or not at all. The read before it is not part of it: only the lock protects that.
        prefix, process = self._job.prefix, self._job.process
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(stock_key(prefix, product), item - 1, ex=KEEP)
            pipe.rpush(sales_key(prefix, product), f"{item} {fence} {process} {task}")
            pipe.expire(sales_key(prefix, product), KEEP)
            await pipe.execute()


async def work(job: Job) -> None:
    """Do ``job`` once the parent says so."""
    async with Redis.from_url(job.url) as redis, Coordinator(redis) as sync:
        shop = Shop(job, redis, sync)
        await shop.connect()
        tell("ready")
        if not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("the demo that started this worker is gone")
        threading.Thread(target=die_with_parent, daemon=True).start()
        await shop.run()


def die_with_parent() -> None:
    """Wait for the end of stdin, and end the process then, whatever it is doing."""
    # Not sys.stdin: a thread that waits inside it when the interpreter ends would crash it.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(work(Job(**json.loads(sys.stdin.readline()))))
