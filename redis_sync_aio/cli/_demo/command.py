"""The demo: processes sell a stock of items under locks, one of them is killed, and the books are checked.

The parent starts the server and the workers (see `worker`), listens to them, kills one in the middle of a
section, and in the end reads the books from Redis.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import secrets
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from redis_sync_aio import AsyncLock, Coordinator, SyncError
from redis_sync_aio._client.address import BadAddress, parse_address
from redis_sync_aio._core.keys import lock_keys
from redis_sync_aio.embedded import EmbeddedServer, ServerNotFound, ServerNotStarted
from redis_sync_aio.tracing._layout import Mark, Timeline, Turn
from redis_sync_aio.tracing._svg import svg

from .._session import Output, counted, explained, keep_secret, print_error
from .run import (
    KEEP,
    MS,
    Audit,
    Figures,
    Job,
    Kill,
    ReportedGrant,
    Run,
    Sale,
    Seen,
    faults,
    lock_name,
    measure,
    percentile,
    sales_key,
    stock_key,
)

# -- The picture of a run of the demo: its sales and its kill, as a timeline that `redis_sync_aio.tracing` draws


def timeline(run: Run, subtitle: str) -> str:
    """Return the picture of ``run`` as the text of an SVG file."""
    killed = 0 if run.kill is None else run.kill.process
    names = {grant.process: f"worker {grant.process}" for grant in run.grants}
    if killed:
        names[killed] = f"worker {killed} (killed)"
    drawn = Timeline(_seconds(run.started), _seconds(run.ended), order=[names[process] for process in sorted(names)])
    for grant in run.grants:
        until = run.held_until(grant)
        # Looks at a sold-out product are too short to be seen.
        if until is not None and (grant.item or grant.released is None):
            drawn.turns.append(_turn(run, grant, names[grant.process], until))
    if run.kill is not None:
        at, product = run.kill.at, run.kill.product
        told = f"worker {killed} killed (SIGKILL) at {(at - run.started) / MS:,.0f} ms while it holds product {product}"
        drawn.marks.append(Mark(_seconds(at), "", told))
    title = "Who held which lock, and when" if run.locked else "Who sold what, and when"
    return svg(drawn, title=title, subtitle=subtitle, by="name")


def _turn(run: Run, grant: ReportedGrant, process: str, until: int) -> Turn:
    turn = Turn(
        f"product {grant.product}", process, _seconds(grant.asked), _seconds(grant.got), _seconds(until), "released",
        task=f"task {grant.task}", fence=grant.fence or None, contended=False,
    )  # fmt: skip
    orphan = run.orphans.get(grant.product)
    if orphan is not None and run.kill is not None and orphan.fence == grant.fence and grant.released is None:
        again = min(orphan.next or orphan.ends, run.ended)
        turn.outcome, turn.until = "killed", _seconds(again)
        if grant.product == run.kill.product and orphan.next is not None:
            turn.note = f"granted again after {(again - run.kill.at) / MS:,.0f} ms"
    return turn


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9


# -- The progress of a run, while it goes on -------------------------------------------------------------------


class Display:
    """Progress: a bar per product in a terminal, else a line now and then."""

    COLUMNS = 2

    def __init__(self, console: Console, stock: Mapping[int, int]) -> None:
        self._console = console
        self._stock = stock
        self._total = sum(stock.values())
        self._sold = dict.fromkeys(stock, 0)
        self._count = 0
        self._since = 0.0
        self._stuck: dict[int, int] = {}  # product -> when its holder was killed
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self) -> None:
        """Note that the workers begin to sell."""
        self._since = time.monotonic()

    def granted(self, grant: ReportedGrant) -> None:
        """Note that a worker got a lock."""
        if grant.got > self._stuck.get(grant.product, grant.got):
            del self._stuck[grant.product]
            self._console.print(f"{self._at()} product {grant.product} is worker {grant.process}'s: the lease ran out")

    def ended(self, grant: ReportedGrant) -> None:
        """Note that a worker released its lock."""
        if grant.item:
            self._sold[grant.product] += 1
            self._count += 1
            if not self._console.is_terminal and self._count % max(1, self._total // 4) == 0:
                self._console.print(f"{self._at()} {self._progress()}")

    def killed(self, kill: Kill) -> None:
        """Note that a worker was killed while it held a lock."""
        self._stuck[kill.product] = kill.at
        self._console.print(
            f"{self._at()} worker {kill.process} killed (SIGKILL) while it held the lock of product {kill.product}"
        )

    def _at(self) -> str:
        return f"{time.monotonic() - self._since:6.2f} s "

    def _progress(self) -> str:
        rate = self._count / max(time.monotonic() - self._since, 0.001) if self._since else 0.0
        return f"{self._count:,} of {self._total:,} sold, {rate:,.0f} per second"

    def _draw(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        names = list(self._stock)
        rows = math.ceil(len(names) / self.COLUMNS)
        for row in range(rows):
            cells = [cell for product in names[row::rows] for cell in self._bar(product)]
            grid.add_row(*cells)
        grid.caption = self._progress()
        return grid

    def _bar(self, product: int) -> tuple[str, ProgressBar]:
        colour = "red" if product in self._stuck else "default"
        bar = ProgressBar(total=self._stock[product], completed=self._sold[product], width=20, complete_style="cyan")
        return f"[{colour}]product {product}[/]", bar


# -- The table of what a run of the demo showed ----------------------------------------------------------------


# -- what the workers measured -----------------------------------------------------------------------------


def ms(nanoseconds: float) -> str:
    """Return a duration in milliseconds, for people."""
    value = nanoseconds / MS
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "-"
    return f"p50 {ms(percentile(values, 50))}   p99 {ms(percentile(values, 99))}"


def table(run: Run, audit: Audit, figures: Figures) -> Table:
    """Return the figures as a table."""
    result = Table(show_header=False, min_width=72)
    result.add_column()
    result.add_column(justify="right")
    _add_audit(result, run, audit)
    _add_figures(result, run, figures)
    if run.kill is not None:
        _add_kill(result, run, run.kill)
    return result


def _add_title(result: Table, title: str) -> None:
    result.add_section()
    result.add_row(f"[bold]{title}")


def _add_check(result: Table, what: str, count: int, good: int = 0) -> None:
    result.add_row(what, f"[{'green' if count == good else 'bold red'}]{count:,}")


def _add_audit(result: Table, run: Run, audit: Audit) -> None:
    _add_title(result, "What the data in Redis says")
    result.add_row("items in stock at start", f"{audit.stocked:,}")
    _add_check(result, "items sold", audit.sold, audit.stocked)
    _add_check(result, "items lost", audit.lost)
    _add_check(result, "items sold twice", audit.twice)
    _add_check(result, "items oversold", audit.oversold)
    if run.locked:
        _add_check(result, "fences out of order", audit.disorder)
    else:
        result.add_row("fences out of order", "no lock, no fences")


def _add_figures(result: Table, run: Run, figures: Figures) -> None:
    _add_title(result, "What the workers measured")
    rate = figures.grants / figures.seconds
    what = "locks granted" if run.locked else "sections entered"
    result.add_row(what, f"{figures.grants:,} in {figures.seconds:.2f} s: {rate:,.0f} per second")
    result.add_row("  to find the product sold out", f"{figures.idle:,}")
    _add_check(result, "two workers in one section", figures.overlaps)
    if run.locked:
        result.add_row("hand-over: release to next process", _spread(figures.handovers))
        result.add_row("waiting for a lock", _spread(figures.waits))
        result.add_row(f"waits given up after {run.timeout * 1000:g} ms", f"{run.gave_up:,}")
    result.add_row("fairness between tasks (Jain; best: 1)", f"{figures.fairness:.3f}")


def _add_kill(result: Table, run: Run, kill: Kill) -> None:
    _add_title(result, "What a crash costs")
    orphan = run.orphans[kill.product]
    others = len(run.orphans) - 1
    result.add_row("one worker killed (SIGKILL)", f"worker {kill.process}, {ms(kill.at - run.started)} after the start")
    also = f", and {others} other{'s' * (others > 1)}" if others else ""
    result.add_row("while it held the lock of", f"product {kill.product}{also}")
    if orphan.next is None:
        result.add_row("granted again", "[bold red]never")
        return
    result.add_row("granted again after", ms(orphan.next - kill.at))
    result.add_row("  of which the rest of the dead lease", ms(orphan.ends - kill.at))
    # The server tells what is left of a lease in whole milliseconds, so this cannot be told any closer.
    result.add_row("  of which the recovery itself", f"under {max(0, orphan.next - orphan.ends) // MS + 2} ms")
    if others:
        slowest = max(one.next - kill.at for one in run.orphans.values() if one.next is not None)
        result.add_row("slowest of all the locks it held", ms(slowest))


STARTING = 30.0
"""Seconds without a word from any worker after which the demo gives up, on top of what a sale may take."""


class DemoFailed(Exception):
    """The demo could not be carried out, so nothing can be said about the locks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a demo."""

    processes: int
    tasks: int
    items: int
    products: int
    work: float  # seconds
    ttl: float  # seconds
    seed: int
    kill: bool
    locked: bool

    @property
    def stock(self) -> dict[int, int]:
        """Number of items of each product."""
        share, rest = divmod(self.items, self.products)
        return {product: share + (product <= rest) for product in range(1, self.products + 1)}

    @property
    def sellers(self) -> str:
        """The workers in words."""
        return f"{counted(self.processes, 'process', 'processes')} x {counted(self.tasks, 'task')}"

    @property
    def timeout(self) -> float:
        """Seconds for which a task waits for a lock before it tries another product."""
        return max(0.25, 10 * self.work)

    def job(self, url: str, prefix: str, process: int, victim: int) -> Job:
        """Return what worker ``process`` is to do; ``victim`` is to be killed in the midst of its share."""
        freeze_at = max(1, self.items // (10 * self.processes)) if process == victim else 0
        return Job(
            url, prefix, process, self.tasks, self.products, self.work, self.timeout, self.ttl, self.seed,
            self.locked, freeze_at,
        )  # fmt: skip


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self.process = process
        self.grants: dict[int, ReportedGrant] = {}

    @classmethod
    async def start(cls, job: Job) -> Worker:
        """Start the process and give it its job; it waits for `go`."""
        # A session of its own: Ctrl-C is for the parent, which then ends its workers.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "redis_sync_aio.cli._demo.run",
            stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
        )  # fmt: skip
        worker = cls(job.process, process)
        worker._write(job.line())
        return worker

    def go(self) -> None:
        """Let it begin to sell."""
        self._write(b"go\n")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)

    async def end(self) -> None:
        """Kill it if it still runs, and wait until it and its pipes are gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


class Floor:
    """One run: the workers, and what they tell."""

    def __init__(self, plan: Plan, prefix: str, redis: Redis, sync: Coordinator, display: Display) -> None:
        self._plan = plan
        self._prefix = prefix
        self._redis = redis
        self._sync = sync
        self._display = display
        self._workers: list[Worker] = []
        self._ready = 0
        self._started = 0
        self._gave_up = 0
        self._kill: Kill | None = None
        self._silence = asyncio.timeout(None)

    async def run(self, url: str) -> Run:
        """Start the workers, let them sell everything, and return what they told."""
        plan = self._plan
        victim = random.Random(plan.seed).randint(1, plan.processes) if plan.kill else 0
        try:
            for number in range(1, plan.processes + 1):
                self._workers.append(await Worker.start(plan.job(url, self._prefix, number, victim)))
            await self._follow_all()
        finally:
            await asyncio.gather(*(worker.end() for worker in self._workers))
        if plan.kill and self._kill is None:
            raise DemoFailed(f"worker {victim} had sold too little to be killed when all was sold: raise --items")
        grants = [grant for worker in self._workers for grant in worker.grants.values()]
        ended = max(grant.released or grant.got for grant in grants)
        return Run(self._started, ended, plan.locked, plan.timeout, grants, self._gave_up, self._kill)

    async def _follow_all(self) -> None:
        try:
            async with self._silence, asyncio.TaskGroup() as group:
                self._heard()
                for worker in self._workers:
                    group.create_task(self._follow(worker))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        except TimeoutError:
            raise DemoFailed("the workers fell silent: no lock was granted, nor did a wait end") from None

    def _heard(self) -> None:
        limit = STARTING + 2 * self._plan.ttl + 20 * self._plan.work
        self._silence.reschedule(asyncio.get_running_loop().time() + limit)

    async def _follow(self, worker: Worker) -> None:
        """Listen to one worker until it ends; it must end well, unless it was killed."""
        assert worker.process.stderr is not None
        errors, _ = await asyncio.gather(worker.process.stderr.read(), self._listen(worker))
        status = await worker.process.wait()
        was_killed = self._kill is not None and self._kill.process == worker.number
        if status != 0 and not was_killed:
            raise DemoFailed(
                f"worker {worker.number} died unexpectedly, with exit status {status}. Its last words:\n"
                + errors.decode(errors="replace")
            )

    async def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        async for line in worker.process.stdout:
            self._heard()
            match json.loads(line):
                case ["ready"]:
                    self._one_more_is_ready()
                case ["got", int(number), int(task), int(product), int(fence), int(asked), int(got)]:
                    grant = ReportedGrant(worker.number, task, product, fence, asked, got)
                    worker.grants[number] = grant
                    self._display.granted(grant)
                case ["end", int(number), int(released), int(item)]:
                    grant = worker.grants[number]
                    grant.released, grant.item = released, item
                    self._display.ended(grant)
                case ["gave up", int(), int(), int(), int()]:
                    self._gave_up += 1
                case ["frozen", int(number)]:
                    await self._kill_holder(worker, worker.grants[number])
                case _:
                    raise DemoFailed(f"worker {worker.number} said something strange: {line!r}")

    def _one_more_is_ready(self) -> None:
        self._ready += 1
        if self._ready == len(self._workers):
            self._started = time.monotonic_ns()
            self._display.started()
            for worker in self._workers:
                worker.go()

    async def _kill_holder(self, worker: Worker, grant: ReportedGrant) -> None:
        """Kill a worker that waits in the middle of a section, and look which locks it took with it."""
        # Look at its own lock first: on a slow machine the lease may have ended when the later looks are answered.
        held = await self._look(grant.product)
        if held is None or held.fence != grant.fence:
            raise DemoFailed(f"worker {worker.number} did not hold product {grant.product} when it was to be killed")
        at = time.monotonic_ns()
        worker.process.kill()
        await worker.process.wait()
        looks = await asyncio.gather(*(self._look(product) for product in self._plan.stock))
        seen = {(look.product, look.fence): look for look in (held, *looks) if look is not None}
        self._kill = Kill(worker.number, grant.product, at, tuple(seen.values()))
        self._display.killed(self._kill)

    async def _look(self, product: int) -> Seen | None:
        before = time.monotonic_ns()  # the answer may be late, and the lease ends no later for that
        for holder in (await AsyncLock(self._sync, lock_name(self._prefix, product)).statistics()).holders:
            if holder.fence is not None and holder.remaining is not None:
                return Seen(product, holder.fence, before + int(holder.remaining * 1e9))
        return None


async def sell(url: str, plan: Plan, display: Display) -> tuple[Run, Audit]:
    """Carry out ``plan`` on the server at ``url``; leave nothing behind there."""
    prefix = f"redis-sync-aio-demo:{secrets.token_hex(6)}"
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync:
        try:
            for product, count in plan.stock.items():
                await redis.set(stock_key(prefix, product), count, ex=KEEP)
            run = await Floor(plan, prefix, redis, sync, display).run(url)
            return run, await read_books(redis, prefix, plan)
        finally:
            # A round trip first: then the server has read whatever killed workers had sent.
            await redis.ping()
            for product in plan.stock:
                keys = lock_keys(lock_name(prefix, product).encode()).all
                await redis.delete(stock_key(prefix, product), sales_key(prefix, product), *keys)


async def read_books(redis: Redis, prefix: str, plan: Plan) -> Audit:
    """Check what the data in Redis says was sold."""
    audit = Audit(fenced=plan.locked)
    for product, count in plan.stock.items():
        left = int(await redis.get(stock_key(prefix, product)) or 0)
        entries = await redis.lrange(sales_key(prefix, product), 0, -1)
        audit.add(count, left, [Sale.parse(entry.decode() if isinstance(entry, bytes) else entry) for entry in entries])
    return audit


# -- the command line --------------------------------------------------------------------------------------

EXITS = {
    0: "every item was sold exactly once, in the order of the fences",
    1: "the books are wrong",
    2: "the demo could not be carried out, or wrong usage",
    130: "ended by Ctrl-C",
}


def demo(
    url: Annotated[str | None, typer.Option(help="Use this server (redis://, rediss://, unix://), "
                                            "not a private one.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    tasks: Annotated[int, typer.Option(min=1, max=1000, help="Tasks in each of them.")] = 8,
    items: Annotated[int, typer.Option(min=1, help="Items to sell.")] = 2000,
    products: Annotated[int, typer.Option(min=1, max=500, help="Products; each has a lock.")] = 20,
    work: Annotated[float, typer.Option(min=0, help="Milliseconds that a sale takes.")] = 15.0,
    ttl: Annotated[float, typer.Option(min=0.2, help="Seconds that a lease lasts unless renewed.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Chooses the worker to kill and who sells what first.")] = 1,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to draw the timeline (SVG).")] = None,
    kill: Annotated[bool, typer.Option(help="Kill a worker that holds a lock.")] = True,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Sell without the lock, to see the check "
                                             "catch it (nobody is killed then).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:  # fmt: skip
    """Sell a stock from several processes, kill one that holds a lock, and check the books.

    Every sale reads the stock from Redis, takes its time, and writes it back: only the lock of the product
    keeps others out.
    """
    check_url(url)
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"--out: there is no directory {out.parent}")
    plan = Plan(processes, tasks, items, products, work / 1000, ttl, seed, kill and not break_lock, not break_lock)
    if plan.kill and processes < 2:
        raise typer.BadParameter("killing the only worker leaves nobody to sell: add --no-kill")
    console = Console(highlight=False, quiet=json)
    try:
        run, audit = carry_out(url, plan, console)
    except (DemoFailed, RedisError, SyncError, ServerNotFound, ServerNotStarted) as error:
        explain(error, url)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    code = report(plan, run, audit, out, console)
    if json:
        Output().json(as_json(run, audit))
    raise typer.Exit(code)


def as_json(run: Run, audit: Audit) -> dict[str, object]:
    """Return what --json prints: what the data in Redis says, what the workers measured (seconds), what was wrong."""
    figures = measure(run)
    orphan = run.orphans.get(run.kill.product) if run.kill is not None else None
    return {
        "books": asdict(audit),
        "granted": figures.grants,
        "seconds": figures.seconds,
        "handover_median": percentile(figures.handovers, 50) / 1e9 if figures.handovers else None,
        "wait_median": percentile(figures.waits, 50) / 1e9 if figures.waits else None,
        "fairness": figures.fairness,
        "killed": None if run.kill is None else run.kill.process,
        "granted_again_after": None
        if run.kill is None or orphan is None or orphan.next is None
        else (orphan.next - run.kill.at) / 1e9,
        "wrong": faults(audit, figures),
    }


def check_url(url: str | None) -> None:
    """Refuse what is not the address of one server."""
    if url is None:
        return
    try:
        address = parse_address(url)
    except BadAddress as error:
        raise typer.BadParameter(f"--url: {error}") from None
    if address.topology != "server":
        raise typer.BadParameter("--url: the demo runs on one server, redis:// or unix://")
    keep_secret(address.password)


def carry_out(url: str | None, plan: Plan, console: Console) -> tuple[Run, Audit]:
    """Carry out ``plan``, on a private server unless a ``url`` is given."""
    lock = "one lock per product" if plan.locked else "WITHOUT the locks"
    console.print(
        f"{plan.sellers} sell {counted(plan.items, 'item')} of {counted(plan.products, 'product')}, "
        f"{lock}. Reading the stock and writing it back are {plan.work * 1000:g} ms apart."
    )
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedServer()).url
        display = stack.enter_context(Display(console, plan.stock))
        return asyncio.run(sell(url, plan, display))


def explain(error: BaseException, url: str | None) -> None:
    """Say on stderr why the demo could not be carried out."""
    chain: BaseException | None = error
    while chain is not None:
        if chain is error or isinstance(chain, DemoFailed):
            where = parse_address(url) if url and isinstance(chain, RedisError) else None
            print_error(f"The demo could not be carried out: {explained(chain, where) if where else chain}")
        chain = chain.__context__


def report(plan: Plan, run: Run, audit: Audit, out: Path | None, console: Console) -> int:
    """Print the figures, draw the timeline, and return the exit code."""
    figures = measure(run)
    console.print(table(run, audit, figures))
    if out is None:
        handle, name = tempfile.mkstemp(prefix="redis-sync-aio-demo-", suffix=".svg")
        os.close(handle)
        out = Path(name)
    rule = (
        "each product has its lock, and a bar is one sale under it"
        if plan.locked
        else "without locks, so sales overlap"
    )
    subtitle = f"{plan.sellers} sell {counted(plan.items, 'item')}: {rule}"
    try:
        out.write_text(timeline(run, subtitle), encoding="utf-8")
    except OSError as error:
        typer.echo(f"The timeline could not be written: {error}", err=True)
        return 2
    console.print(f"Timeline: {escape(str(out))}", soft_wrap=True)
    wrong = faults(audit, figures)
    if wrong:
        console.print(f"[bold red]FAILED:[/] {'; '.join(wrong)}.", soft_wrap=True)
        return 1
    what = "the item" if audit.stocked == 1 else f"each of {audit.stocked:,} items"
    console.print(f"[bold green]PASSED:[/] {what} was sold exactly once.")
    return 0
