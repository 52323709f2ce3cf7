"""The field on which workers contend while faults are injected, as the parent process sees it.

    async with Field(seed, names=4, workers=6, ttl=0.5, long=0.05, patience=10, persistent=False) as field:
        ...                                # kill, stop, cut, restart
        history = await field.end()        # everybody finishes; then all is looked at

What the workers tell arrives in `told`; who was killed and when is in `deaths`. The resource that the locks
protect is kept by a server of its own, so that it outlives whatever happens to the server under attack.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock, Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.options import OPTIONS
from .history import Commit, Death, History, text
from .worker import Doom, Job, wall

ROOT = Path(__file__).parents[2]
SOON = Backoff(initial=0.002, cap=0.02)


@dataclass(eq=False)
class Worker:
    """A worker, from outside."""

    number: int
    pid: int
    doom: Doom

    def signal(self, what: signal.Signals) -> int:
        """Send it; return when that was."""
        at = wall()
        os.kill(self.pid, what)  # never another process: the nursery does not reap
        return at


class Field:
    """See the top of this module."""

    def __init__(
        self,
        seed: int,
        *,
        names: int,
        workers: int,
        ttl: float,
        long: float,
        patience: float,
        persistent: bool,
        elect: bool = False,
        servers: int = 1,
    ) -> None:
        """``patience``: seconds after which a request that still waits counts as stuck. ``elect``: elections.

        ``servers``: the number of servers of a Redlock; 1: it is a lock.
        """
        self._elect = elect
        self.random = random.Random(seed)
        self.names = [f"chaos:{number}" for number in range(names)]
        self.ttl, self._long, self._patience, self._count = ttl, long, patience, workers
        self.server = EmbeddedServer(persistent=persistent)
        self.others = [EmbeddedServer(persistent=persistent) for _ in range(servers - 1)]
        self.resource_server = EmbeddedServer()
        self.workers: list[Worker] = []
        self.told: list[dict[str, Any]] = []
        self.deaths: list[Death] = []
        self._inquests: list[asyncio.Task[None]] = []
        self._pids: asyncio.Queue[int] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._numbers = 0
        self._rest = b""
        self._stack = AsyncExitStack()

    # -- life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.server)
            for server in (*self.others, self.resource_server):
                await stack.enter_async_context(server)
            self.admin: Redis = await stack.enter_async_context(self.server.client())
            self.resource: Redis = await stack.enter_async_context(self.resource_server.client())
            stack.callback(self._start_nursery().__exit__, None, None, None)
            stack.callback(self._end_nursery)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _start_nursery(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "error", "-m", f"{__package__}.worker"]
        self._nursery = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._nursery.stdout is not None
        asyncio.get_running_loop().add_reader(self._nursery.stdout.fileno(), self._read)
        return self._nursery

    def _end_nursery(self) -> None:
        assert self._nursery.stdout is not None
        asyncio.get_running_loop().remove_reader(self._nursery.stdout.fileno())
        os.killpg(self._nursery.pid, signal.SIGKILL)  # a session of its own: it and its workers

    def _read(self) -> None:
        assert self._nursery.stdout is not None
        data = os.read(self._nursery.stdout.fileno(), 65536)
        assert data, "the nursery is gone"
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what = json.loads(line)
            if "pid" in what:
                self._pids.put_nowait(what["pid"])
            else:
                self.told.append(what)
                if "dead" in what:
                    self._died(what["dead"], what["at"])
        self._changed.set()
        self._changed.clear()

    async def until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait for something that workers tell."""
        async with asyncio.timeout(timeout):
            while not condition():
                await self._changed.wait()

    # -- workers ---------------------------------------------------------------------------------------

    def born(self, worker: Worker) -> bool:
        """Return whether it contends."""
        return {"born": worker.number} in self.told

    def gone(self, worker: Worker) -> bool:
        """Return whether it died."""
        return worker not in self.workers

    def stopped(self, worker: Worker, times: int) -> bool:
        """Return whether it has stopped itself so many times."""
        return self.told.count({"stopping": worker.number}) >= times

    async def populate(self, url: Callable[[int], str] | None = None) -> None:
        """Start all workers; ``url(number)`` is where each finds the server. Return when all contend."""
        for _ in range(self._count):
            await self.spawn(url=url)
        await self.until(lambda: sum("born" in what for what in self.told) >= self._count)

    async def spawn(self, doom: Doom = "outside", url: Callable[[int], str] | None = None) -> Worker:
        """Start one more."""
        number, self._numbers = self._numbers, self._numbers + 1
        locks = url(number) if url is not None else self.server.url
        seed = self.random.randrange(2**32)
        job = Job(
            number,
            locks,
            self.resource_server.url,
            self.names,
            self.ttl,
            self._patience,
            self._long,
            seed,
            doom,
            engine=OPTIONS.chaos_engine,
            elect=self._elect,
            others=tuple(server.url for server in self.others),
            share=OPTIONS.chaos_share,
        )
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(job.line())
        worker = Worker(number, await self._pids.get(), doom)
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill it from outside."""
        worker.signal(signal.SIGKILL)
        self._died(worker.number, wall())

    def _died(self, number: int, at: int) -> None:
        [worker] = [worker for worker in self.workers if worker.number == number]
        self.workers.remove(worker)
        self._inquests.append(asyncio.create_task(self._inquest(worker, at)))

    async def _inquest(self, worker: Worker, at: int) -> None:
        """Find out what the dead one holds, now and when the server has seen its end.

        The system takes a moment to end a process, and what is handed over to it meanwhile is its own, too.
        """
        held = await self._held(worker)
        self.deaths.append(Death(worker.number, at, worker.doom, held))

        async def seen() -> bool:
            return all(one["name"] != f"worker-{worker.number}" for one in await self.admin.client_list())

        await wait_until(seen, SOON, timeout=5)
        if later := await self._held(worker) - held:
            self.deaths.append(Death(worker.number, wall(), "between", later))

    async def _held(self, worker: Worker) -> frozenset[str]:
        """Return the locks that are the worker's: its process id is in its tokens."""
        tokens = await self.admin.mget(self.names)
        mark = f":{worker.pid}:"
        return frozenset(name for name, token in zip(self.names, tokens, strict=True) if mark in text(token or ""))

    # -- the end ---------------------------------------------------------------------------------------

    async def end(self) -> History:
        """Let everybody finish, check that nothing is left behind, and return what happened."""
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        left = {worker.number for worker in self.workers}
        await self.until(lambda: left <= {what["worker"] for what in self.told if "ended" in what}, self._patience + 5)
        await asyncio.gather(*self._inquests)
        history = await self.history()
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(Coordinator(self.admin))]
            for server in self.others:
                client = await stack.enter_async_context(server.client())
                servers.append(await stack.enter_async_context(Coordinator(client)))
            for name in self.names:
                locks = [server.lock(name) for server in servers]

                async def free(locks: list[AsyncLock] = locks) -> bool:
                    for lock in locks if self.others else []:  # a request drops the tickets of the dead
                        if (held := await lock.try_acquire()) is not None:
                            await held.release()
                    found = [await lock.statistics() for lock in locks]
                    return not any(view.held or view.waiting for view in found)

                await wait_until(free, SOON, timeout=self.ttl + 1)
                lease = await (AsyncRedlock(servers, name) if self.others else locks[0]).acquire(timeout=1)
                assert lease.fence > history.last_fence(name)
                await lease.release()
        return history

    async def history(self) -> History:
        """Return what has happened so far."""
        commits: dict[str, list[Commit]] = {}
        for name in self.names:
            commits[name] = [Commit.read(line) for line in await self.resource.lrange(f"log:{name}", 0, -1)]
        return History(commits, self.told, self.deaths)
