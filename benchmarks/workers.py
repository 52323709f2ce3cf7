"""Worker processes: they live as long as the benchmark, and run one job after the other, each in a fresh loop.

A job is a module-level coroutine function; its first argument is a `Desk`. At ``desk.meet()`` it waits until all jobs
of the run are there and the main process lets them go. That is the start barrier, and the moment to read the server's
counters. The main process sleeps while workers work.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import traceback
from collections.abc import Callable, Coroutine, MutableSequence, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self, TypeAlias, cast

Job: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
Body: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Cells: TypeAlias = MutableSequence[int]

CELLS = 64
PATIENCE = 30.0
_spawn = multiprocessing.get_context("spawn")


class WorkerFailed(Exception):
    """A job raised an error or did not finish; the message says which job and why."""


@dataclass(slots=True)
class Desk:
    """The context of a job: the server's address, and shared memory of plain 64-bit integers (not atomic)."""

    url: str
    cells: Cells
    uvloop: bool
    _pipe: Connection

    def meet(self) -> None:
        """Wait for all other jobs. Blocks the event loop: only call it when no command is in flight."""
        gc.collect()
        self._pipe.send(("met", None))
        self._pipe.recv()

    async def run_tasks(self, bodies: Sequence[Body], threads: bool) -> None:
        """Run all ``bodies`` to their end: as tasks, or each in a thread with its own loop, where it may block."""
        if not threads:
            await asyncio.gather(*(body() for body in bodies))
            return
        errors: list[BaseException] = []

        def run(body: Body) -> None:
            try:
                run_loop(body(), self.uvloop)
            except BaseException as error:
                errors.append(error)

        crowd = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
        for thread in crowd:
            thread.start()
        await asyncio.to_thread(_join, crowd)
        if errors:
            raise errors[0]


def _join(crowd: Sequence[threading.Thread]) -> None:
    for thread in crowd:
        thread.join()


def run_loop(job: Coroutine[Any, Any, Any], uvloop: bool) -> Any:
    """Run a coroutine in a fresh event loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if uvloop:
        import uvloop as module

        factory = module.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(job)


def _serve(pipe: Connection, cells: Cells, uvloop: bool) -> None:
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        job, url, arguments = cast("tuple[Job, str, dict[str, Any]]", order)
        gc.collect()
        try:
            result = run_loop(job(Desk(url, cells, uvloop, pipe), **arguments), uvloop)
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
        else:
            pipe.send(("done", result))


@dataclass(slots=True)
class Worker:
    """One worker process, as the main process sees it."""

    cells: Cells
    uvloop: bool
    _pipe: Connection = field(init=False)
    _process: Any = field(init=False)

    def __post_init__(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        arguments = (theirs, self.cells, self.uvloop)
        self._process = _spawn.Process(target=_serve, args=arguments, daemon=True, name="benchmark worker")
        self._process.start()
        theirs.close()

    def start(self, url: str, job: Job, **arguments: Any) -> None:
        """Start a job."""
        self._pipe.send((job, url, arguments))

    def met(self) -> None:
        """Wait until the job is at its next barrier."""
        self._hear("met")

    def go(self) -> None:
        """Let the job continue."""
        self._pipe.send(None)

    def result(self) -> Any:
        """Wait for the end of the job."""
        return self._hear("done")

    def _hear(self, expected: str) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise WorkerFailed(f"a worker did not finish within {PATIENCE:.0f} seconds")
        try:
            word, value = self._pipe.recv()
        except EOFError:
            raise WorkerFailed("a worker process died") from None
        if word != expected:
            raise WorkerFailed(str(value))
        return value

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait until it is gone; do nothing if it is already gone."""
        if self._pipe.closed:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class Pool:
    """Two permanent workers, and temporary ones."""

    SIZE = 2

    def __init__(self, uvloop: bool) -> None:
        self._uvloop = uvloop
        self.cells = cast("Cells", _spawn.RawArray("q", CELLS))
        self._workers: list[Worker] = []

    def workers(self) -> list[Worker]:
        """Return the permanent workers, starting them on the first call."""
        while len(self._workers) < self.SIZE:
            self._workers.append(self.extra())
        return self._workers

    def extra(self) -> Worker:
        """Start a temporary worker; the caller has to kill it."""
        return Worker(self.cells, self._uvloop)

    def clear(self) -> None:
        """Set the shared cells to 0."""
        for index in range(CELLS):
            self.cells[index] = 0

    def close(self) -> None:
        """Kill the permanent workers; `workers` starts them again."""
        while self._workers:
            self._workers.pop().kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def sleep_until(reached: Callable[[], bool], step: float = 0.0005, limit: float = PATIENCE) -> None:
    """Sleep in steps until a condition without a signal is reached, or ``limit`` seconds have passed."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit
    while not reached() and loop.time() < end:
        await asyncio.sleep(step)
