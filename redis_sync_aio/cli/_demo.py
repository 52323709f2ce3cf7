"""The command `demo`: processes sell a stock under locks, one of them is killed, and the books are checked.

The parent starts a server and the workers, listens to them, kills one in the middle of a sale, and reads the books
from Redis. A worker is ``python -m redis_sync_aio.cli._demo``. It reads its job from stdin, answers "ready", and
starts at the next line. It writes a line of JSON to stdout for each sale. Times are `time.monotonic_ns`, which is one
clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from redis_sync_aio import AsyncLock, Coordinator, SyncError
from redis_sync_aio._client.address import BadAddress, parse_address
from redis_sync_aio._core.keys import lock_keys
from redis_sync_aio.embedded import EmbeddedServer, ServerNotFound, ServerNotStarted

from ._session import Output, counted, explained, keep_secret, print_error

MS = 1_000_000  # nanoseconds
KEEP = 3600
"""Seconds after which the demo's data is gone from the server even if it was not deleted."""
STARTING = 30.0
"""Seconds without a word from any worker after which the demo gives up, on top of what a sale may take."""


class DemoFailed(Exception):
    """A demo that could not be carried out, so nothing can be said about the locks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a demo."""

    # fmt: off
    processes: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4
    tasks: Annotated[int, typer.Option(min=1, max=1000, help="Tasks in each of them.")] = 8
    items: Annotated[int, typer.Option(min=1, help="Items to sell.")] = 2000
    products: Annotated[int, typer.Option(min=1, max=500, help="Products; each has a lock.")] = 20
    work: Annotated[float, typer.Option(min=0, help="Milliseconds that a sale takes.")] = 15.0
    ttl: Annotated[float, typer.Option(min=0.2, help="Seconds that a lease lasts unless renewed.")] = 2.0
    seed: Annotated[int, typer.Option(help="Chooses the worker to kill and who sells what first.")] = 1
    kill: Annotated[bool, typer.Option(help="Kill a worker that holds a lock.")] = True
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Sell without the lock, to see the check "
                                             "catch it (no worker is killed then).")] = False
    # fmt: on

    def __post_init__(self) -> None:
        if self.victim and self.processes < 2:
            raise typer.BadParameter("killing the only worker leaves none to sell: add --no-kill")

    @property
    def stock(self) -> dict[int, int]:
        """Number of items of each product."""
        share, rest = divmod(self.items, self.products)
        return {product: share + (product <= rest) for product in range(1, self.products + 1)}

    @property
    def victim(self) -> int:
        """Number of the worker to kill; 0: none."""
        return random.Random(self.seed).randint(1, self.processes) if self.kill and not self.break_lock else 0


# -- The books: what is in stock, and what was sold, in Redis --------------------------------------------------


@dataclass
class Audit:
    """The books, from the data in Redis alone: whatever the workers believe does not count."""

    stocked: int = 0
    sold: int = 0
    left: int = 0  # still in stock when all workers had ended
    lost: int = 0  # neither sold nor in stock
    twice: int = 0  # sales of an item that was sold before
    oversold: int = 0  # sales beyond what there was
    disorder: int = 0  # sales under a fence that is not greater than the one before
    fenced: bool = True

    def add(self, stocked: int, left: int, sales: Sequence[tuple[int, int]]) -> None:
        """Check one product: its sales are items and fences; items are numbered ``stocked`` to 1, as they are sold."""
        items = {item for item, _ in sales}
        self.stocked += stocked
        self.sold += len(sales)
        self.left += max(left, 0)
        self.lost += len(set(range(max(left, 0) + 1, stocked + 1)) - items)
        self.twice += len(sales) - len(items)
        self.oversold += max(0, len(sales) - stocked)
        if self.fenced:
            self.disorder += sum(after <= before for (_, before), (_, after) in pairwise(sales))

    def faults(self) -> list[str]:
        """Return the faults in words; an empty list if all is well."""
        found = {
            f"{self.left:,} left unsold": self.left,
            f"{self.lost:,} lost (neither sold nor in stock)": self.lost,
            f"{self.twice:,} sold twice": self.twice,
            f"{self.oversold:,} oversold (more sales than stock)": self.oversold,
            f"{counted(self.disorder, 'fence')} out of order": self.disorder,
        }
        return [text for text, count in found.items() if count]


class Shop:
    """The stock, the sales and the locks of a demo."""

    def __init__(self, redis: Redis, sync: Coordinator, prefix: str, plan: Plan) -> None:
        self.redis = redis
        self.plan = plan
        self._prefix = prefix
        self.locks = {it: AsyncLock(sync, f"{prefix}:lock:{it}", ttl=plan.ttl) for it in plan.stock}

    def _stock(self, product: int) -> str:
        return f"{self._prefix}:stock:{product}"

    def _sales(self, product: int) -> str:
        return f"{self._prefix}:sales:{product}"

    async def fill(self) -> None:
        """Write the stock."""
        for product, count in self.plan.stock.items():
            await self.redis.set(self._stock(product), count, ex=KEEP)

    async def left(self, product: int) -> int:
        """Return the number of items in stock."""
        return int(await self.redis.get(self._stock(product)) or 0)

    async def write_sale(self, product: int, item: int, fence: int) -> None:
        """Take an item off the stock, and enter it in the books."""
        # In one MULTI, since other tasks of a worker that is killed are just here: its last sales are then
        # written whole or not at all. The read before it is not part of it: only the lock protects that.
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.set(self._stock(product), item - 1, ex=KEEP)
            pipe.rpush(self._sales(product), f"{item} {fence}")
            pipe.expire(self._sales(product), KEEP)
            await pipe.execute()

    async def audit(self) -> Audit:
        """Check the books."""
        audit = Audit(fenced=not self.plan.break_lock)
        for product, count in self.plan.stock.items():
            sales = [entry.split() for entry in await self.redis.lrange(self._sales(product), 0, -1)]
            audit.add(count, await self.left(product), [(int(item), int(fence)) for item, fence in sales])
        return audit

    async def clear(self) -> None:
        """Delete everything."""
        # A round trip first: then the server has read whatever killed workers had sent.
        await self.redis.ping()
        for product, lock in self.locks.items():
            await self.redis.delete(self._stock(product), self._sales(product), *lock_keys(lock.name.encode()).all)


# -- A worker process: tasks that sell items, each under the lock of its product -------------------------------


def tell(kind: str, *values: int) -> None:
    """Tell the parent. One write: the line arrives whole or not at all."""
    os.write(1, json.dumps([kind, *values]).encode() + b"\n")


class Seller:
    """The tasks of one worker."""

    def __init__(self, shop: Shop, process: int) -> None:
        self._shop = shop
        self._process = process
        # The victim stops in this sale, holding the lock, and waits to be killed.
        self._freeze_in = max(1, shop.plan.items // (10 * shop.plan.processes)) if process == shop.plan.victim else 0

    async def run(self) -> None:
        """Sell until nothing is left."""
        async with asyncio.TaskGroup() as group:
            for task in range(self._shop.plan.tasks):
                group.create_task(self._sell_everything(task))

    async def _sell_everything(self, task: int) -> None:
        """Sell one item of each product in turn, in an order of this task's own, until all are sold out."""
        products = list(self._shop.plan.stock)
        random.Random(f"{self._shop.plan.seed} {self._process} {task}").shuffle(products)
        while products:
            for product in products.copy():
                if not await self._sell_one(product):
                    products.remove(product)

    async def _sell_one(self, product: int) -> bool:
        """Sell one item; return False if none was left."""
        asked = time.monotonic_ns()
        async with nullcontext() if self._shop.plan.break_lock else self._shop.locks[product].acquire() as lease:
            got, fence = time.monotonic_ns(), lease.fence if lease is not None else 0
            item = await self._shop.left(product)
            if item > 0:
                await asyncio.sleep(self._shop.plan.work / 1000)  # everything that others could do meanwhile
                self._freeze_in -= 1
                if self._freeze_in == 0:
                    tell("frozen", product, fence)
                    await asyncio.Event().wait()
                await self._shop.write_sale(product, item, fence)
            released = time.monotonic_ns()
        tell("held", product, fence, asked, got, released, max(item, 0))
        return item > 0


async def work(url: str, prefix: str, process: int, plan: Plan) -> None:
    """Sell once the parent says so."""
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync:
        shop = Shop(redis, sync, prefix, plan)
        await asyncio.gather(*(redis.ping() for _ in range(plan.tasks)))  # so that no grant pays for connecting
        await shop.locks[1].locked()
        tell("ready")
        if not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("the demo that started this worker is gone")
        threading.Thread(target=die_with_parent, daemon=True).start()
        await Seller(shop, process).run()


def die_with_parent() -> None:
    """Wait for the end of stdin, and end the process then, whatever it is doing."""
    # Not sys.stdin: a thread that waits inside it when the interpreter ends would crash it.
    while os.read(0, 1):
        pass
    os._exit(1)


# -- The parent: it starts the workers, listens, and kills one -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """One lease, as its worker reported it; times in nanoseconds."""

    process: int
    product: int
    fence: int
    asked: int
    got: int
    released: int
    item: int
    """The item that was sold; 0: the product was sold out."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a worker that held a lock."""

    process: int
    product: int
    fence: int
    at: int


@dataclass
class Run:
    """The reports of the workers."""

    started: int
    held: list[Held]
    kill: Kill | None = None

    @property
    def seconds(self) -> float:
        """Seconds until the last release."""
        return (max(it.released for it in self.held) - self.started) / 1e9

    def waits(self) -> list[int]:
        """Return how long each grant took."""
        return [it.got - it.asked for it in self.held]

    def handovers(self) -> list[int]:
        """Return the times from a release to the next holder, which was waiting in another process."""
        ordered = sorted(self.held, key=lambda it: (it.product, it.got))
        return [
            after.got - before.released
            for before, after in pairwise(ordered)
            if before.product == after.product
            and before.process != after.process
            and after.fence
            and after.asked < before.released
        ]

    def recovery(self) -> int | None:
        """Return the time from the kill to the next grant of the lock; None if it was never granted again."""
        if self.kill is None:
            return None
        after = [it.got for it in self.held if it.product == self.kill.product and it.got > self.kill.at]
        return min(after) - self.kill.at if after else None


class Floor:
    """One run: the workers, and what they report."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._workers: list[Process] = []
        self._ready = 0
        self._sold = 0
        self._run = Run(0, [])
        self._is_granted_again = False
        self._patience = STARTING + 2 * plan.ttl + 20 * plan.work / 1000

    async def run(self, url: str, prefix: str) -> Run:
        """Start the workers, let them sell everything, and return their reports."""
        plan = self._plan
        try:
            for number in range(1, plan.processes + 1):
                # A session of its own: Ctrl-C is for the parent, which then ends its workers.
                worker = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "redis_sync_aio.cli._demo",
                    stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
                )  # fmt: skip
                self._workers.append(worker)
                _write(worker, json.dumps([url, prefix, number, asdict(plan)]))
            async with asyncio.timeout(self._patience) as self._silence, asyncio.TaskGroup() as group:
                for number, worker in enumerate(self._workers, 1):
                    group.create_task(self._follow(number, worker))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        except TimeoutError:
            raise DemoFailed("the workers fell silent: no lock was granted") from None
        finally:
            for worker in self._workers:
                if worker.returncode is None:
                    worker.kill()
            await asyncio.gather(*(worker.communicate() for worker in self._workers))
        if plan.victim and self._run.kill is None:
            raise DemoFailed(f"worker {plan.victim} had sold too little to be killed when all was sold: raise --items")
        return self._run

    async def _follow(self, number: int, worker: Process) -> None:
        """Listen to one worker until it ends; it must end well, unless it was killed."""
        assert worker.stderr is not None
        errors, _ = await asyncio.gather(worker.stderr.read(), self._listen(number, worker))
        status = await worker.wait()
        if status != 0 and not (self._run.kill is not None and self._run.kill.process == number):
            words = errors.decode(errors="replace")
            raise DemoFailed(f"worker {number} died unexpectedly, with exit status {status}. Its last words:\n{words}")

    async def _listen(self, number: int, worker: Process) -> None:
        assert worker.stdout is not None
        async for line in worker.stdout:
            # One timer for all: with few products, a worker's turn may come long after that of the others.
            with suppress(RuntimeError):  # it has just expired, and this task will be cancelled
                self._silence.reschedule(asyncio.get_running_loop().time() + self._patience)
            match json.loads(line):
                case ["ready"]:
                    self._note_ready()
                case ["held", *values]:
                    self._note_held(Held(number, *values))
                case ["frozen", int(product), int(fence)]:
                    worker.kill()
                    self._run.kill = Kill(number, product, fence, time.monotonic_ns())
                    self._say(f"worker {number} killed (SIGKILL) while it held product {product}, fence {fence}")

    def _note_ready(self) -> None:
        self._ready += 1
        if self._ready == len(self._workers):
            self._run.started = time.monotonic_ns()
            for worker in self._workers:
                _write(worker, "go")

    def _note_held(self, held: Held) -> None:
        self._run.held.append(held)
        kill = self._run.kill
        if kill is not None and not self._is_granted_again and held.product == kill.product and held.got > kill.at:
            self._is_granted_again = True
            self._say(f"product {held.product} is worker {held.process}'s, fence {held.fence}: the lease ran out")
        self._sold += held.item > 0
        if held.item and self._sold % max(1, self._plan.items // 4) == 0:
            self._say(f"{self._sold:,} of {self._plan.items:,} sold")

    def _say(self, text: str) -> None:
        self._console.print(f"{(time.monotonic_ns() - self._run.started) / 1e9:6.2f} s  {text}", soft_wrap=True)


def _write(worker: Process, line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line.encode() + b"\n")


async def sell(url: str, plan: Plan, console: Console) -> tuple[Run, Audit]:
    """Carry out ``plan`` on the server at ``url``; leave nothing behind there."""
    prefix = f"redis-sync-aio-demo:{secrets.token_hex(6)}"
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync:
        shop = Shop(redis, sync, prefix, plan)
        try:
            await shop.fill()
            run = await Floor(plan, console).run(url, prefix)
            return run, await shop.audit()
        finally:
            with suppress(RedisError):  # the reason is on its way to the user
                await shop.clear()


# -- The command line ------------------------------------------------------------------------------------------

EXITS = {
    0: "every item was sold exactly once, in the order of the fences",
    1: "the totals do not add up",
    2: "the demo could not be carried out, or wrong usage",
    130: "ended by Ctrl-C",
}


def demo(
    *,
    url: Annotated[
        str | None, typer.Option(help="Use this server (redis://, rediss://, unix://), not a private one.")
    ] = None,
    plan: Plan,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Sell a stock from several processes, kill one that holds a lock, and check the books.

    Each sale reads the stock, pauses for --work ms, and writes it back; only the lock of the product prevents a
    race.
    """
    check_url(url)
    console = Console(highlight=False, quiet=json)
    sellers = f"{counted(plan.processes, 'process', 'processes')} x {counted(plan.tasks, 'task')}"
    lock = "WITHOUT the locks" if plan.break_lock else "one lock per product"
    console.print(
        f"{sellers} sell {counted(plan.items, 'item')} of {counted(plan.products, 'product')}, {lock}. "
        f"Reading the stock and writing it back are {plan.work:g} ms apart."
    )
    try:
        with ExitStack() as stack:
            server = url or stack.enter_context(EmbeddedServer()).url
            run, audit = asyncio.run(sell(server, plan, console))
    except (DemoFailed, RedisError, SyncError, ServerNotFound, ServerNotStarted) as error:
        why = explained(error, parse_address(url)) if url and isinstance(error, RedisError) else error
        print_error(f"The demo could not be carried out: {why}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json:
        Output().json(as_json(run, audit))
    else:
        show(run, audit, console)
    raise typer.Exit(1 if audit.faults() else 0)


def check_url(url: str | None) -> None:
    """Refuse an address that does not name one server."""
    if url is None:
        return
    try:
        address = parse_address(url)
    except BadAddress as error:
        raise typer.BadParameter(f"--url: {error}") from None
    if address.topology != "server":
        raise typer.BadParameter("--url: the demo runs on one server, redis:// or unix://")
    keep_secret(address.password)


def as_json(run: Run, audit: Audit) -> dict[str, object]:
    """Return the report of --json: the books, the figures of the workers (seconds), and the faults."""
    handovers, recovery = run.handovers(), run.recovery()
    return {
        "books": asdict(audit),
        "granted": len(run.held),
        "seconds": run.seconds,
        "handover_median": median(handovers) / 1e9 if handovers else None,
        "wait_median": median(run.waits()) / 1e9,
        "killed": None if run.kill is None else run.kill.process,
        "granted_again_after": None if recovery is None else recovery / 1e9,
        "wrong": audit.faults(),
    }


def show(run: Run, audit: Audit, console: Console) -> None:
    """Print the books, the figures and the verdict."""
    table = Table(show_header=False, min_width=72)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("items in stock at start", f"{audit.stocked:,}")
    checks = {"items sold": (audit.sold, audit.stocked), "items lost": (audit.lost, 0)}
    checks |= {"items sold twice": (audit.twice, 0), "items oversold": (audit.oversold, 0)}
    if audit.fenced:
        checks["fences out of order"] = audit.disorder, 0
    for what, (count, good) in checks.items():
        table.add_row(what, f"[{'green' if count == good else 'bold red'}]{count:,}")
    table.add_section()
    what = "locks granted" if audit.fenced else "sections entered"
    table.add_row(what, f"{len(run.held):,} in {run.seconds:.2f} s: {len(run.held) / run.seconds:,.0f} per second")
    if audit.fenced:
        table.add_row("waiting for a lock", _spread(run.waits()))
        table.add_row("hand-over: release to next process", _spread(run.handovers()))
    if run.kill is not None:
        table.add_section()
        recovery = run.recovery()
        table.add_row("killed while it held a lock", f"worker {run.kill.process}, product {run.kill.product}")
        found = "[bold red]never" if recovery is None else _ms(recovery)
        table.add_row("  granted again after", found)
    console.print(table)
    if wrong := audit.faults():
        console.print(f"[bold red]FAILED:[/] {'; '.join(wrong)}.", soft_wrap=True)
    else:
        what = "the item" if audit.stocked == 1 else f"each of {audit.stocked:,} items"
        console.print(f"[bold green]PASSED:[/] {what} was sold exactly once.")


def _spread(durations: Sequence[int]) -> str:
    return f"median {_ms(median(durations))}, longest {_ms(max(durations))}" if durations else "-"


def _ms(nanoseconds: float) -> str:
    value = nanoseconds / MS
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.2f} ms"


if __name__ == "__main__":
    _url, _prefix, _process, _plan = json.loads(sys.stdin.readline())
    asyncio.run(work(_url, _prefix, _process, Plan(**_plan)))
