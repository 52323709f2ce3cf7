"""`Coordinator.until_signal`: a signal drains the leases, cancels the body, and then ends the program."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, LeaderElection, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.types import Term

from ..support.body import FAST, assert_undisturbed, for_ever, later, waits
from ..support.inside import now
from ..support.programs import environment

JOB = "job"


@pytest.fixture(autouse=True)
def plain_handlers() -> Iterator[None]:
    """Begin without the handler of coverage, to which a block would pass the signal on."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


# -- in a process of its own -------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, signal, sys, anyio
from redis_sync_aio import Coordinator

signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as without coverage, which has a handler of its own
reader = None

async def line():
    return await reader.readline()

async def work(sync):
    while True:
        async with sync.lock("job", ttl=3):
            print("holding", flush=True)
            await line()
            print("done", flush=True)

async def lead(term):
    print("leading", flush=True)
    await asyncio.Event().wait()

async def main():
    global reader
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Coordinator.from_url(sys.argv[1]) as sync:
        async with sync.until_signal(drain=float(sys.argv[2])):
            BODY
        print("after", flush=True)

RUN
"""
ALONE = "await work(sync)"
GROUP = """
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sync.election("leader").run(lead))
                tasks.create_task(work(sync))
                tasks.create_task(work(sync))
"""
ANYIO_GROUP = """
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sync.election("leader").run, lead)
                tasks.start_soon(work, sync)
                tasks.start_soon(work, sync)
"""
DRAINS = 3600


class Program:
    """A program that runs, holds the lock "job", and ends its jobs when it is told."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.send: Callable[[signal.Signals], None] = process.send_signal

    async def says(self, *lines: str) -> None:
        """Wait for lines, in any order."""
        found = [(await self._process.stdout.readline()).decode().strip() for _ in lines]
        assert sorted(found) == sorted(lines), found

    def end_job(self) -> None:
        self._process.stdin.write(b"\n")

    async def ended(self) -> tuple[int, str]:
        """Return its exit code, and what else it said."""
        rest = await self._process.stdout.read()
        return await self._process.wait(), rest.decode()


@asynccontextmanager
async def program(
    server: EmbeddedServer, drain: float = 0, body: str = ALONE, run: str = "asyncio.run(main())"
) -> AsyncIterator[Program]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM.replace("BODY", body).replace("RUN", run), server.url, str(drain),
        stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


CODES = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)], ids=str)


@CODES
@pytest.mark.parametrize("run", ["asyncio.run(main())", "anyio.run(main)"])
@pytest.mark.real
async def test_a_signal_releases_and_ends_the_program(
    server: EmbeddedServer, redis: Redis, number: signal.Signals, code: int, run: str
) -> None:
    """SIGTERM is an order to end, and was obeyed: 0. Ctrl-C ends it as any Python program, so that a shell stops, too.

    What follows the block does not run: it cannot know whether the body has ended.
    """
    async with program(server, run=run) as process:
        await process.says("holding")
        process.send(number)
        assert await process.ended() == (code, "")
        assert not await AsyncLock(redis, JOB).locked()


@pytest.mark.parametrize(
    ("body", "run"), [(ALONE, "asyncio.run(main())"), (GROUP, "asyncio.run(main())"), (ANYIO_GROUP, "anyio.run(main)")]
)
@CODES
@pytest.mark.ci
@pytest.mark.real
async def test_a_job_that_runs_may_end(
    server: EmbeddedServer, redis: Redis, body: str, run: str, number: signal.Signals, code: int
) -> None:
    """Its neighbours in a task group, one that leads and one that waits for the lock, do not end it earlier."""
    async with program(server, DRAINS, body, run) as process:
        await process.says("holding", *(["leading"] if body != ALONE else []))
        lease = await redis.get(JOB)
        if body != ALONE:
            await wait_until(waits(AsyncLock(redis, JOB)), FAST, timeout=30)
        process.send(number)
        if body != ALONE:  # the leader resigns, and the waiter has left
            await wait_until(waits(AsyncLock(redis, JOB), 0), FAST, timeout=30)
            async with AsyncLock(redis, "leader").acquire(timeout=30):
                pass
        assert await redis.get(JOB) == lease
        process.end_job()
        assert await process.ended() == (code, "done\n")
        assert not await AsyncLock(redis, JOB).locked()


@pytest.mark.parametrize(("number", "released"), [(signal.SIGTERM, False), (signal.SIGINT, True)], ids=str)
@pytest.mark.ci
@pytest.mark.real
async def test_a_second_signal_ends_it_immediately(
    server: EmbeddedServer, redis: Redis, number: signal.Signals, released: bool
) -> None:
    """SIGTERM kills. Ctrl-C is handled by `asyncio.run`, which cancels the main task, and so releases."""
    async with program(server, DRAINS, GROUP) as process:
        await process.says("holding", "leading")
        await wait_until(waits(AsyncLock(redis, JOB)), FAST, timeout=30)
        process.send(number)
        await wait_until(waits(AsyncLock(redis, JOB), 0), FAST, timeout=30)
        process.send(number)
        assert await process.ended() == (-number, "")
        assert (await AsyncLock(redis, JOB).locked()) is not released


# -- in this process ---------------------------------------------------------------------------------------------------


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def send() -> None:
    signal.raise_signal(signal.SIGTERM)


async def ends_the_program(main: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(SystemExit) as end:
        async with asyncio.timeout(30):
            await main()
    assert end.value.code == 0


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) == handler, "it was not restored"
    finally:
        signal.signal(number, before)


async def test_the_handlers_from_before_are_back_at_the_end(sync: Coordinator) -> None:
    before = handlers()
    async with sync.until_signal():
        assert not set(before) & set(handlers())
    assert handlers() == before
    with pytest.raises(LookupError):
        async with sync.until_signal():
            raise LookupError
    assert handlers() == before


async def test_blocks_may_overlap(sync: Coordinator, other: Coordinator) -> None:
    """The one that began first is left first; a signal then ends the other, and the handlers are back."""
    before = handlers()
    first, second = sync.until_signal(), other.until_signal()

    async def both() -> None:
        await first.__aenter__()
        async with second:
            await first.__aexit__(None, None, None)
            send()
            await for_ever()

    await ends_the_program(both)
    assert handlers() == before


async def test_a_handler_of_others_gets_the_signal_after_the_drain(sync: Coordinator) -> None:
    """Once, with nothing held. The code after the block runs: the handler decides about the end."""
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)
        assert sync.statistics() == ()

    with handled(signal.SIGTERM, handler):
        async with asyncio.timeout(30), sync.until_signal(drain=DRAINS):
            async with sync.lock(JOB):
                send()
                await asyncio.sleep(0)
                assert not came
            await for_ever()
        assert came == [signal.SIGTERM]
    await assert_undisturbed()


async def test_a_server_that_handles_signals_in_the_body_passes_them_on(sync: Coordinator) -> None:
    """As uvicorn does: it ends in order, restores the handlers, and raises the signal that it was sent."""
    stop = asyncio.Event()

    async def serve() -> None:
        async with sync.until_signal():
            with handled(signal.SIGTERM, lambda number, frame: stop.set()):
                send()
                await stop.wait()
            send()
            await for_ever()

    await ends_the_program(serve)


async def test_a_handler_of_the_loop_is_called_once(sync: Coordinator) -> None:
    """The loop calls it when the signal comes, whatever else handles it."""
    came: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, came.append, "it")
    try:
        async with asyncio.timeout(30), sync.until_signal():
            send()
            await for_ever()
        for _ in range(3):
            await asyncio.sleep(0)
        assert came == ["it"]
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_a_signal_that_is_ignored_stays_ignored(sync: Coordinator) -> None:
    """Of a program in the background of a shell, for example."""
    with handled(signal.SIGINT, signal.SIG_IGN):
        async with sync.until_signal():
            signal.raise_signal(signal.SIGINT)
            for _ in range(5):
                await asyncio.sleep(0)


async def test_a_request_of_a_body_is_refused_or_cancelled_with_it(sync: Coordinator, other: Coordinator) -> None:
    """New ones are refused, as they would wait for the end of the drain. Those that wait are cancelled after it."""
    ends: list[str] = []

    async def work() -> None:
        try:
            async with sync.lock("taken"):
                raise AssertionError("it was granted")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    lease = await other.lock("taken").acquire()

    async def main() -> None:
        async with sync.until_signal(drain=DRAINS), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(work())
            await wait_until(waits(AsyncLock(other, "taken")), FAST, timeout=20)
            async with sync.lock(JOB):
                send()
                await wait_until(waits(AsyncLock(other, "taken"), 0), FAST, timeout=20)
                for refused in (sync.lock("more").acquire, sync.lock("more").__aenter__):
                    with pytest.raises(CoordinatorClosed):
                        await refused()
                await lease.release()
                assert not waiting.done()
            await for_ever()

    await ends_the_program(main)
    assert ends == ["cancelled"]


@pytest.mark.parametrize("what", ["election", "inner locks"])
async def test_a_signal_any_number_of_turns_after_a_body_began(redis: Redis, what: str) -> None:
    """It ends the program also where it meets a grant, a refusal or a release; its cancellation leaves no trace."""
    begun = False

    async def lead(term: Term) -> None:
        nonlocal begun
        begun = True
        await for_ever()

    async def nest(sync: Coordinator) -> None:
        nonlocal begun
        async with sync.lock(JOB):
            while True:
                async with sync.lock("more"):
                    begun = True

    async def main() -> None:
        async with Coordinator(redis) as sync, sync.until_signal(drain=DRAINS):
            later(turns, send)
            await (nest(sync) if what == "inner locks" else sync.election("leader").run(lead))

    turns = 0
    while not begun or turns < 60:
        await ends_the_program(main)
        await assert_undisturbed()
        assert not await AsyncLock(redis, JOB).locked()
        assert await LeaderElection(redis, "leader").leader() is None
        turns += 1


async def test_a_body_that_takes_too_long_is_cancelled_and_its_own_error_is_raised(sync: Coordinator) -> None:
    """After the time of the drain."""
    began = now()

    async def main() -> None:
        async with asyncio.timeout(30), sync.until_signal(drain=3), sync.lock(JOB):
            send()
            try:
                await for_ever()
            finally:
                assert now() - began == pytest.approx(3, abs=0.1)
                raise LookupError

    with pytest.raises(LookupError):
        await main()
    assert not await AsyncLock(sync.client, JOB).locked()
    await assert_undisturbed()


async def test_a_body_that_ends_meanwhile_waits_for_other_tasks(sync: Coordinator) -> None:
    """They may end their jobs, too."""
    holding, go = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        async with sync.lock(JOB):
            holding.set()
            await go.wait()
        return "done"

    async def main() -> None:
        async with sync.until_signal(drain=DRAINS):
            await holding.wait()
            send()
            asyncio.get_running_loop().call_later(5, go.set)

    working = asyncio.create_task(work())
    await ends_the_program(main)
    assert go.is_set()
    assert await working == "done"
    await assert_undisturbed()


async def test_a_cancellation_from_outside_ends_the_drain(sync: Coordinator) -> None:
    holding = asyncio.Event()

    async def main() -> None:
        async with sync.until_signal(drain=DRAINS), sync.lock(JOB):
            send()
            holding.set()
            await for_ever()

    running = asyncio.create_task(main())
    await holding.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert sync.statistics() == ()


async def test_it_is_entered_once_in_the_main_thread_with_a_time(sync: Coordinator, server: EmbeddedServer) -> None:
    block = sync.until_signal()
    async with block:
        pass
    with pytest.raises(RuntimeError, match="entered before: call it again"):
        async with block:
            pass
    for drain in (-1, float("nan"), "5", None):
        bad: Any = drain
        with pytest.raises((TypeError, ValueError), match="drain"):
            sync.until_signal(drain=bad)

    async def elsewhere() -> None:
        async with Coordinator.from_url(server.url) as own, own.until_signal():
            pass

    with pytest.raises(RuntimeError, match=r"until_signal\(\) needs the main thread"):
        await asyncio.to_thread(asyncio.run, elsewhere())
