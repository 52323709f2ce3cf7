"""Draws docs/assets/ls.svg, show.svg, top.svg and doctor.svg, in some seconds: ``python -m benchmarks.screens``.

Some processes use locks on a private server, one holds a lock that others wait for, and another program has left a key
behind. `inspect` and the doctor look at that, and the commands' own code prints it. Hosts, numbers of processes, times
and loads are replaced by constant ones before, so the same code draws the same pictures on every machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Final

import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.cli import _doctor as command
from redis_sync_aio.cli._doctor.facts import Facts, facts_of, rights_of, servers
from redis_sync_aio.cli._doctor.findings import LEVELS, Finding, of_rights, of_server
from redis_sync_aio.cli._look import render
from redis_sync_aio.cli._look.top import TopScreen
from redis_sync_aio.cli._session import Shared, connect
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import HolderView, NameView, WaiterView, inspect
from redis_sync_aio.types import BaseLease

ADDRESS = "redis-1:6379"
STUCK = "orders:42"
PROCESSES = [("web-1", 71), ("web-2", 64), ("worker-3", 28376)]
NOW = 1_795_676_167_022_853
"""The time of the pictures, in microseconds."""
HELD = {STUCK: (340.2, 25.8), "orders:7": (0.2, 4.8), "smtp": (2.4, 27.6), "catalogue": (11.0, 19.0)}
"""Seconds for which the first holder of a name has had it, and that are left. Each further one has had it for less."""
WAITED = {STUCK: 338.1, "orders:7": 0.9, "smtp": 1.7, "catalogue": 10.2, "import": 95.0}
"""Seconds for which the first request for a name has waited; each further one has waited for half as long."""
LOOKS = 4
BAD = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--tcp-keepalive", "0", "--appendonly", "no")
"""Settings of the server that the doctor looks at."""
LOAD: Mapping[str, int] = {"used_memory": 12_400_000, "connected_clients": 24, "maxclients": 10_000}
COLOURS = [
    (75, 78, 85),
    (232, 98, 98),
    (152, 190, 90),
    (222, 190, 80),
    (110, 160, 210),
    (170, 130, 180),
    (110, 180, 190),
]
THEME = TerminalTheme((24, 27, 31), (236, 238, 240), [*COLOURS, (236, 238, 240)])
_FONTS: Final = re.compile(r"\s*@font-face \{.*?\n    \}", re.DOTALL)


class Scene:
    """Some processes (coordinators that stand for processes) and what they hold and wait for."""

    def __init__(self, client: Redis, processes: list[Coordinator]) -> None:
        self._client = client
        self._processes = processes
        self._known: dict[str, tuple[str, int]] = {}  # by inbox
        self._waiting: list[asyncio.Task[BaseLease]] = []

    async def set_up(self) -> None:
        """Acquire everything, and let requests wait; each is in the queue before the next one comes."""
        web, other, worker = self._processes
        for process, known in zip(self._processes, PROCESSES, strict=True):
            lease = await process.lock("who").acquire()
            self._known[lease.token.split(":")[2]] = known
            await lease.release()
        await self._client.set("import", "batch-7")
        await worker.lock(STUCK).acquire()
        self._busy: BaseLease = await web.lock("orders:7").acquire()
        for process in (web, other, worker):
            await process.semaphore("smtp", limit=3).acquire()
        await web.read_write_lock("catalogue").read().acquire()
        await other.read_write_lock("catalogue").read().acquire()
        for process in (web, other, web):
            await self._wait(STUCK, process.lock(STUCK).acquire)
        for process in (web, other):
            await self._wait("smtp", process.semaphore("smtp", limit=3).acquire)
        await self._wait("catalogue", worker.read_write_lock("catalogue").write().acquire)
        await self._wait("import", worker.lock("import").acquire)
        self._next = await self._wait("orders:7", other.lock("orders:7").acquire)

    async def hand_over(self) -> None:
        """Let the waiter of the busy lock have it, and its former holder wait again."""
        former, waiter, worker = self._processes
        await self._busy.release()
        self._busy = await self._next
        self._processes = [waiter, former, worker]
        self._next = await self._wait("orders:7", former.lock("orders:7").acquire)

    async def _wait(
        self, name: str, acquire: Callable[[], Coroutine[object, object, BaseLease]]
    ) -> asyncio.Task[BaseLease]:
        before = await self._queued(name)
        task = asyncio.create_task(acquire())
        self._waiting.append(task)

        async def is_queued() -> bool:
            return await self._queued(name) > before

        await wait_until(is_queued, timeout=20)
        return task

    async def _queued(self, name: str) -> int:
        return sum(view.waiting for view in await inspect(self._client, name))

    async def look(self) -> list[NameView]:
        """Return what the server knows, with the hosts, processes and times of the pictures."""
        return [self._steady(view) for view in await inspect(self._client)]

    def _steady(self, view: NameView) -> NameView:
        known = [self._holder(it) for it in view.holders if not it.foreign]
        held, left = HELD.get(view.name, (0.0, 0.0))
        holders = [it for it in view.holders if it.foreign]
        for number, it in enumerate(sorted(known, key=lambda it: it.token)):
            age = held / 2**number
            since = {} if it.held_for is None else {"held_for": age, "fence": round(NOW - age * 1e6)}
            holders.append(replace(it, remaining=left + number, **since))
        waiters = [self._waiter(it, WAITED[view.name] / 2**place) for place, it in enumerate(view.waiters)]
        fence = max((it.fence for it in holders if it.fence), default=None)
        return replace(view, server=ADDRESS, holders=tuple(holders), waiters=tuple(waiters), fence=fence)

    def _holder(self, it: HolderView) -> HolderView:
        host, pid, token = self._party(it.token)
        return replace(it, host=host, pid=pid, label=f"{host}:{pid}", token=token)

    def _waiter(self, it: WaiterView, waited: float) -> WaiterView:
        host, pid, token = self._party(it.token)
        return replace(it, host=host, pid=pid, label=f"{host}:{pid}", token=token, waited=waited)

    def _party(self, token: str) -> tuple[str, int, str]:
        inbox, number = token.split(":")[2:]
        host, pid = self._known[inbox]
        return host, pid, f"{host}:{pid}:aaf28b6741520dd{pid % 10}:{number}"

    async def end(self) -> None:
        """Withdraw the requests."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)


async def diagnosis(server: EmbeddedServer) -> list[Finding]:
    """Return what the doctor finds; memory, clients, latency and clock as on a usual server."""
    shared = Shared(server.url)
    async with connect(shared, decode_responses=True) as session:
        [ask] = servers(session).values()
        facts = await facts_of(ADDRESS, ask)
        found = [*of_rights(await rights_of(session, ask)), *of_server(usual(facts))]
    return sorted(found, key=lambda one: LEVELS.index(one.level), reverse=True)


def usual(facts: Facts) -> Facts:
    """Return the facts without those that differ from run to run."""
    return replace(facts, info={**facts.info, **LOAD}, latency=0.0004, ahead=0.0, slowest=("", 0.0))


def terminal(command_line: str, width: int) -> Console:
    """Return a terminal in which that has been typed."""
    console = Console(
        record=True, file=StringIO(), width=width, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text(f"$ redis-sync-aio {command_line}", style="bold"))
    return console


async def screens() -> dict[str, Console]:
    """Play the scene, and return what each command prints."""
    found = {
        name: terminal(line, width)
        for name, line, width in (
            ("ls", "ls", 80),
            ("show", f"show {STUCK}", 100),
            ("top", "top", 88),
            ("doctor", "doctor", 108),
        )
    }
    top = TopScreen(ADDRESS, 1.0)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(args=BAD))
        clients = [await stack.enter_async_context(server.client()) for _ in range(4)]
        command.show(await diagnosis(server), ADDRESS, found["doctor"])
        processes = [await stack.enter_async_context(Coordinator(client)) for client in clients[1:]]
        scene = Scene(clients[0], processes)
        await scene.set_up()
        render.print_names(found["ls"], await scene.look(), more=False)
        render.print_name(found["show"], STUCK, [view for view in await scene.look() if view.name == STUCK])
        for second in range(LOOKS):
            top.take(await scene.look(), second)
            await scene.hand_over()
        await scene.end()
    found["top"].print(top.draw(88, 24))
    return found


def draw(name: str, console: Console) -> str:
    """Return the picture, without the fonts that a browser would fetch from elsewhere."""
    drawn = console.export_svg(title="redis-sync-aio", theme=THEME, unique_id=f"screen-{name}")
    return _FONTS.sub("", drawn)


def main(
    out: Annotated[Path, typer.Option(file_okay=False, exists=True, help="Where to draw.")] = Path("docs/assets"),
) -> None:
    """Play the scene, and draw what ls, show, top and doctor print."""
    for name, console in asyncio.run(screens()).items():
        path = out / f"{name}.svg"
        path.write_text(draw(name, console) + "\n", "utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
