"""A gate in front of an external API that allows four calls at a time, across all processes and services.

A call takes one of four permits, an export two. First come, first served, even with an export among small calls;
if a process dies, its permits come back when its leases end.

Run ``python examples/rate_gate.py`` (needs ``pip install 'redis_sync_aio[embedded]' aiohttp``): three processes with
eight tasks each call an API, simulated by this process, which answers 429 to every call beyond its limit. Exit code 0
if that never happened. On your own: ``REDIS_URL=… API_URL=… python examples/rate_gate.py worker``, many times.

Read more in docs/guides/semaphores.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator
from redis_sync_aio.embedded import EmbeddedServer

SLOTS = 4
WEIGHTS = {"/now": 1, "/export": 2}
PROCESSES, TASKS, CALLS = 3, 8, 10  # each task makes CALLS calls


class Gate:
    """A client of the API that never uses more slots at a time than it allows."""

    def __init__(self, session: aiohttp.ClientSession, sync: Coordinator) -> None:
        self._session = session
        self._semaphore = AsyncSemaphore(sync, "gate:weather", SLOTS, ttl=10)

    async def get(self, path: str, patience: float = 30.0) -> str:
        """Return the API's answer; raise AcquireTimeout if our turn did not come within ``patience`` seconds."""
        async with self._semaphore.acquire(weight=WEIGHTS[path], timeout=patience), self._session.get(path) as answer:
            answer.raise_for_status()
            return await answer.text()


async def run_process(redis_url: str, api_url: str) -> None:
    """Call the API from many tasks; every fifth call is an export."""
    async with (
        Redis.from_url(redis_url) as redis,
        Coordinator(redis) as sync,
        aiohttp.ClientSession(api_url) as session,
        asyncio.TaskGroup() as group,
    ):
        gate = Gate(session, sync)

        async def work(task: int) -> None:
            for call in range(CALLS):
                await gate.get("/export" if (task + call) % 5 == 0 else "/now")

        for task in range(TASKS):
            group.create_task(work(task))


class Api:
    """A stand-in for the external API: it answers 429 to a call that needs more slots than are free."""

    def __init__(self) -> None:
        self.used = self.peak = self.answered = self.refused = 0
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        weight = WEIGHTS[request.path]
        if self.used + weight > SLOTS:
            self.refused += 1
            raise web.HTTPTooManyRequests
        self.used += weight
        self.peak = max(self.peak, self.used)
        await asyncio.sleep(0.005)
        self.used -= weight  # before the answer is sent: the caller frees its permits when it arrives
        self.answered += 1
        return web.Response(text="sunny")

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_routes([web.get(path, self._answer) for path in WEIGHTS])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()


async def demonstrate() -> int:
    async with EmbeddedServer() as server, Api() as api:
        environment = {**os.environ, "REDIS_URL": server.url, "API_URL": api.url}
        workers = [
            await asyncio.create_subprocess_exec(sys.executable, __file__, "worker", env=environment)
            for _ in range(PROCESSES)
        ]
        ends = [await worker.wait() for worker in workers]
    print(f"{api.answered} calls answered, {api.refused} refused; at most {api.peak} of {SLOTS} slots in use at a time")
    kept = api.refused == 0 and api.answered == PROCESSES * TASKS * CALLS and ends == [0] * PROCESSES
    return 0 if kept else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(run_process(os.environ["REDIS_URL"], os.environ["API_URL"]))
    else:
        sys.exit(asyncio.run(demonstrate()))
