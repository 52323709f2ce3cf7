"""``python -m benchmarks.profile``: where the time of one uncontended acquire and release goes.

This uses no profiler: profilers slow small Python functions down several times. Instead whole programs are timed by the
CPU clocks of client and server, their rounds interleaved. Each does a little more than the one before, and a layer is
the difference. Figures are the minimum of the rounds: other load on the machine only adds to them.

    loop      twice a pair a task waits for a future that an answer of the server completes: prepared PINGs whose
              answers are counted. The event loop, the sockets, the tasks.
    hiredis   packing our two commands and parsing their answers, in a separate loop.
    ours      the rest of the client's time.

The second table is about releases alone: our acquire, sent directly over a bare protocol, followed by lock/release.lua,
by a bare compare-and-delete script, or by the same as a command, where the server has it.

The third is the latency of one task. Separate rounds would also compare the noise of the machine at different times;
here both programs are in one loop and take turns of `TURN` pairs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, cast

import hiredis
import typer
from rich.console import Console
from rich.table import Table

from redis_sync_aio._core.keys import lock_keys
from redis_sync_aio._scripts import load
from redis_sync_aio.embedded import EmbeddedServer

from .contestant import Contestant, Grip
from .contestants import BY_NAME
from .measure import middle
from .raw import COMPARE_AND_DELETE, RawProtocol, Word, pack
from .scenarios.throughput import pairs_of
from .server_stats import ServerStats
from .workers import Desk, Pool

PING, PONG = pack((b"PING",)), b"+PONG\r\n"
TOKEN = b"a-host-name:12345:0123456789abcdef:%d"
TICKET = b"rsa:0123456789abcdef|%d|2000|1|" + TOKEN
TTL_MS = 30_000


class Pings(RawProtocol):
    """Only the loop: prepared commands are sent, and arriving bytes are counted."""

    at_once = False
    """Whether to write immediately, as our link does for a lone task."""
    _rest = 0

    def command(self, *words: Word) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append(future)
        if self.at_once:
            self._write(PING)
            return future
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(PING)
        return future

    def data_received(self, data: bytes) -> None:
        answers, self._rest = divmod(self._rest + len(data), len(PONG))
        for _ in range(answers):
            self._reply(None)


class Loop(Contestant):
    name = "loop"
    about = "two PINGs, packed once, their answers counted"
    kind = "raw"
    protocol: ClassVar[type[RawProtocol]] = Pings

    async def open(self) -> None:
        self.connection = await self.protocol.open(self.url)
        self._grips = 0

    async def close(self) -> None:
        await self.connection.close()

    def grip(self, key: str) -> Grip:
        self._grips += 1
        assert isinstance(self.connection, Pings)
        self.connection.at_once = self._grips == 1
        return Grip(self.connection.command, self.connection.command)


class OurRelease(Loop):
    """lock/acquire.lua called directly, without a lease; and a release to compare."""

    name = "lock/release.lua"
    about = "hands over to the next waiter"
    protocol = RawProtocol
    source = load("lock/release").source

    async def open(self) -> None:
        await super().open()
        self._numbers = itertools.count()
        self._acquire = await self.connection.command(b"SCRIPT", b"LOAD", load("lock/acquire").source)
        self._release = await self.connection.command(b"SCRIPT", b"LOAD", self.source)

    def grip(self, key: str) -> Grip:
        command, keys = self.connection.command, lock_keys(key.encode()).all
        give_back = self.giving_back(keys)

        async def acquire() -> bytes:
            number = next(self._numbers)
            token = TOKEN % number
            ticket = TICKET % (number, number)
            if type(await command(b"EVALSHA", self._acquire, 4, *keys, token, TTL_MS, ticket, 0, b"0")) is not int:
                raise AssertionError(f"{key} was not free")
            return token

        async def release(token: bytes) -> None:
            if await give_back(token) != 1:
                raise AssertionError(f"{key} was not released")

        return Grip(acquire, release)

    def giving_back(self, keys: Sequence[bytes]) -> Callable[[bytes], Awaitable[Any]]:
        """Return a function that sends the release."""
        return lambda token: self.connection.command(b"EVALSHA", self._release, 4, *keys, token, b"", b"0")


class BareScript(OurRelease):
    name = "a script"
    about = "compare and delete; sees no queue"
    source = COMPARE_AND_DELETE

    def giving_back(self, keys: Sequence[bytes]) -> Callable[[bytes], Awaitable[Any]]:
        return lambda token: self.connection.command(b"EVALSHA", self._release, 1, keys[0], token)


class BareCommand(OurRelease):
    name = "DELIFEQ"
    about = "the same as a command: Valkey 9.0"

    def giving_back(self, keys: Sequence[bytes]) -> Callable[[bytes], Awaitable[Any]]:
        return lambda token: self.connection.command(b"DELIFEQ", keys[0], token)


LAYERS = ("loop", "raw-protocol", "ours", "redis-py")
RELEASES: tuple[type[Contestant], ...] = (OurRelease, BareScript, BareCommand)
LATENCY = ("ours", "raw-protocol")
TURN = 40
PROGRAMS: dict[str, type[Contestant]] = {**BY_NAME, Loop.name: Loop, **{one.name: one for one in RELEASES}}


async def job(desk: Desk, program: str, tasks: int, seconds: float) -> tuple[int, float, float]:
    """Return pairs, seconds, seconds of CPU of one program."""
    return await pairs_of(desk, PROGRAMS[program](desk.url), tasks, seconds)


async def turns(desk: Desk, seconds: float) -> list[list[float]]:
    """Return the microseconds per pair of each turn, for each of `LATENCY`."""
    found: list[list[float]] = [[] for _ in LATENCY]
    async with AsyncExitStack() as stack:
        grips = list[Grip]()
        for name in LATENCY:
            player = PROGRAMS[name](desk.url)
            await player.open()
            stack.push_async_callback(player.close)
            grips.append(player.grip(player.name))
            await _turn(grips[-1])
        order = list(zip(grips, found, strict=True))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not found[0]:
            for grip, times in order:
                times.append(await _turn(grip) / TURN * 1e6)
            order.reverse()
    return found


async def _turn(grip: Grip) -> float:
    start = time.perf_counter()
    for _ in range(TURN):
        await grip.release(await grip.acquire())
    return time.perf_counter() - start


class Spent:
    """Microseconds per pair in all rounds of one program."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, ...]] = []

    def add(self, *figures: float) -> None:
        """Record a round: the whole pair, the CPU of the client, of the server, and of its scripts."""
        self._rounds.append(figures)

    @property
    def least(self) -> tuple[float, ...]:
        """Return the minimum of each figure."""
        return tuple(map(min, zip(*self._rounds, strict=True)))


def play(pool: Pool, url: str, stats: ServerStats, program: str, tasks: int, seconds: float, spent: Spent) -> None:
    """Run one round of one program."""
    stats.flush()
    worker = pool.workers()[0]
    worker.start(url, job, program=program, tasks=tasks, seconds=seconds)
    looks = list[tuple[float, float]]()
    for _ in range(2):
        worker.met()
        looks.append((stats.look().cpu, stats.script_time()[1] / 1e6))
        worker.go()
    count, elapsed, cpu = cast("tuple[int, float, float]", worker.result())
    server, scripts = (after - before for before, after in zip(*looks, strict=True))
    spent.add(*(figure / count * 1e6 for figure in (elapsed, cpu, server, scripts)))


def latency(pool: Pool, url: str, seconds: float) -> list[list[float]]:
    """Return the result of `turns`, run in a worker process."""
    worker = pool.workers()[0]
    worker.start(url, turns, seconds=seconds)
    return cast("list[list[float]]", worker.result())


def hiredis_time(tasks: int) -> float:
    """Return the microseconds that hiredis takes for the commands and answers of a pair."""
    token = TOKEN % 123456
    commands = ((token, TTL_MS, TICKET % (123456, 123456), 0, b"0"), (token, b"", b"0"))
    answers = (b":1780000000123456\r\n" * tasks, b":1\r\n" * tasks)
    reader, best = hiredis.Reader(), float("inf")
    for _ in range(max(20, 2000 // tasks)):
        start = time.perf_counter()
        for command, answer in zip(commands, answers, strict=True):
            for _ in range(tasks):
                pack(command)
            reader.feed(answer)
            for _ in range(tasks):
                reader.gets()
        best = min(best, time.perf_counter() - start)
    return best / tasks * 1e6


def layers(found: dict[str, Spent], tasks: int) -> dict[str, float]:
    """Return the rows of the first table."""
    pair, client, server, scripts = found["ours"].least
    bare_pair, bare_client, bare_server, _ = found["raw-protocol"].least
    loop, parsing = found["loop"].least[1], hiredis_time(tasks)
    return {
        "client: event loop, sockets, tasks": loop,
        "client: hiredis": parsing,
        "client: redis-py (it only opened the connection)": 0.0,
        "client: ours": client - loop - parsing,
        "server: our scripts": scripts,
        "server: reading, parsing, answering": server - scripts,
        "a pair, from start to end": pair,
        "the bare protocol: client": bare_client,
        "the bare protocol: server": bare_server,
        "the bare protocol: a pair": bare_pair,
        "redis-py's Lock: client": found["redis-py"].least[1],
        "redis-py's Lock: a pair": found["redis-py"].least[0],
    }


def show(
    console: Console,
    columns: dict[str, dict[str, float]],
    releases: dict[str, Spent],
    lone: dict[str, list[list[float]]],
) -> None:
    """Print the three tables."""
    table = Table("µs a pair", *columns, title="Where the time goes", title_justify="left")
    for row in next(iter(columns.values())):
        table.add_row(row, *(f"{column[row]:.1f}" for column in columns.values()))
    console.print(table)
    table = Table("released by", "", "server µs", "client µs", "pairs/s", title="Releases", title_justify="left")
    for one in RELEASES:
        pair, client, cpu, _ = releases[one.name].least
        table.add_row(one.name, one.about, f"{cpu:.1f}", f"{client:.1f}", f"{1e6 / pair:,.0f}")
    console.print(table)
    table = Table("median µs a pair", *LATENCY, "ratio", "turns", title="Latency", title_justify="left")
    for title, times in lone.items():
        ours, bare = map(middle, times)
        table.add_row(title, f"{ours:.1f}", f"{bare:.1f}", f"{ours / bare:.2f}", str(len(times[0])))
    console.print(table)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each program.")] = 7,
    seconds: Annotated[float, typer.Option(help="Seconds of each round.")] = 0.3,
) -> None:
    """Print where the time of one uncontended acquire and release goes, in microseconds a pair."""
    console = Console()
    columns, releases = dict[str, dict[str, float]](), dict[str, Spent]()
    lone = dict[str, list[list[float]]]()
    for uvloop in (False, True) if find_spec("uvloop") else (False,):
        with EmbeddedServer() as server, Pool(uvloop) as pool, ServerStats(server.url) as stats:
            for tasks in (100, 1):
                names = (*LAYERS, *(one.name for one in RELEASES if tasks == 100 and not uvloop))
                found = {name: Spent() for name in names}
                title = f"{tasks} task{'s' if tasks > 1 else ''}, {'uvloop' if uvloop else 'asyncio'}"
                with console.status(title):
                    for number in range(rounds):
                        for name in names[number % len(names) :] + names[: number % len(names)]:
                            play(pool, server.url, stats, name, tasks, seconds, found[name])
                columns[title] = layers(found, tasks)
                if tasks == 1:
                    lone[title] = latency(pool, server.url, rounds * seconds)
                releases.update((name, found[name]) for name in names if name not in LAYERS)
    show(console, columns, releases, lone)


if __name__ == "__main__":
    typer.run(main)
