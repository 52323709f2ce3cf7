"""P5 and P12: the end of a program takes little time although Redis is gone, and says nothing on standard error.

A scene is a small program of its own: it takes Redis away, and then its last line is reached. It is to end within
3 seconds (docs/guides/leases.md). What is asserted leaves room for a busy machine, and is less than any other limit:
``retry_for`` (10 seconds), that of an undo (60), and the answers, which are given 20 seconds here.

What may appear on standard error is the log, which tells of an outage as ever; so it is switched off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncSemaphore,
    Coordinator,
    Unreachable,
    compat,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import for_ever
from ..support.processes import play

BOUND = 9.0
"""Seconds from the last line to the end."""

Source = Coordinator | Redis
Scene = Callable[["Redises"], Awaitable[None]]
Context = AbstractAsyncContextManager[object]
SCENES: dict[str, Scene] = {}


class Redises:
    """The servers of one scene, which go away together."""

    def __init__(self, how: str) -> None:
        self.servers: list[EmbeddedServer] = []
        self.how = how
        self.gone = 0.0
        self.kept: list[object] = []

    def start(self) -> EmbeddedServer:
        server = EmbeddedServer(port=0)
        server.start()
        self.servers.append(server)
        return server

    def client(self, server: int = 0) -> Redis:
        client = self.servers[server].client(socket_timeout=20)
        self.kept.append(client)  # not collected in the middle of the end
        return client

    def source(self, server: int = 0) -> Source:
        """A client, or a coordinator, of its own."""
        client = self.client(server)
        return Coordinator(client, push="never") if "never" in self.how else client

    def leave(self) -> None:
        """The last line of the program."""
        self.go()
        raise SystemExit

    def go(self) -> None:
        for server in self.servers:
            (server.pause if "pause" in self.how else server.kill)()
        self.gone = time.monotonic()


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


async def all_inside(redises: Redises, *contexts: Callable[[], Context]) -> None:
    """Let a task be inside each of them, with nobody to wait for it."""
    inside = [asyncio.Event() for _ in contexts]

    async def body(number: int) -> None:
        async with contexts[number]():
            inside[number].set()
            await for_ever()

    redises.kept += [asyncio.create_task(body(number)) for number in range(len(contexts))]
    for event in inside:
        await event.wait()


@scene
async def a_wait_timed_out(redises: Redises) -> None:
    """Its undo is on its way while the client is closed."""
    async with redises.client() as client:
        lock = AsyncLock(Coordinator(client, push="never") if "never" in redises.how else client, "x")
        await lock.acquire()
        with suppress(AcquireTimeout):
            await lock.acquire(timeout=0.5)
        redises.leave()


@scene
async def an_undo_waits(redises: Redises) -> None:
    """The request was given up without an answer, and is undone for a minute while anything else goes on."""
    lock = AsyncLock(redises.source(), "x")
    await lock.acquire()
    redises.go()
    with suppress(AcquireTimeout, Unreachable):
        await lock.acquire(timeout=0.5)
    redises.gone = time.monotonic()
    raise SystemExit


@scene
async def bodies(redises: Redises) -> None:
    """Tasks hold something, each with a client of its own."""
    await all_inside(
        redises,
        *(lambda n=number: AsyncLock(redises.source(), f"lock {n}") for number in range(5)),
        *(lambda n=number: compat.Lock(redises.client(), f"compat {n}", timeout=30) for number in range(3)),
        *(lambda: AsyncSemaphore(redises.source(), "permits", limit=9) for _ in range(3)),
        lambda: AsyncLock(redises.source(), "shared", share=True),
        lambda: AsyncReadWriteLock(redises.source(), "either").write(),
        lambda: AsyncMultiLock(redises.source(), ["one", "two", "three"]),
    )
    redises.leave()


@scene
async def bodies_inside_bodies(redises: Redises) -> None:
    """What leaves waits once, not for each of the bodies that it leaves."""

    async def body() -> None:
        async with AsyncExitStack() as stack:
            for name in "abcde":
                await stack.enter_async_context(AsyncLock(redises.source(), name))
            await stack.enter_async_context(compat.Lock(redises.client(), "f", timeout=30))
            inside.set()
            await for_ever()

    inside = asyncio.Event()
    redises.kept.append(asyncio.create_task(body()))
    await inside.wait()
    redises.leave()


@scene
async def redlock(redises: Redises) -> None:
    for _ in range(2):
        redises.start()
    sources = [redises.source(number) for number in range(3)]
    await all_inside(redises, *(lambda n=number: AsyncRedlock(sources, f"most {n}") for number in range(3)))
    redises.leave()


@scene
async def waiters(redises: Redises) -> None:
    """Tasks wait for permits, each with a client of its own."""
    await AsyncSemaphore(redises.client(), "permits", limit=1).acquire()
    permits = [AsyncSemaphore(redises.source(), "permits", limit=1) for _ in range(5)]
    redises.kept += [asyncio.create_task(it.acquire()) for it in permits]
    while (await permits[0].statistics()).waiting < len(permits):
        await asyncio.sleep(0.01)
    redises.leave()


@scene
async def releases_in_a_clean_up(redises: Redises) -> None:
    """Programs that release by hand: the cancellation leaves, and not an error of the release."""

    async def by_hand(lock: AsyncLock | compat.Lock) -> None:
        lease = await lock.acquire()
        try:
            inside.release()
            await for_ever()
        finally:
            await (lock if isinstance(lock, compat.Lock) or lease is True else lease).release()  # type: ignore[union-attr]

    inside = asyncio.Semaphore(0)
    locks = AsyncLock(redises.source(), "by hand"), compat.Lock(redises.client(), "compat by hand", timeout=30)
    redises.kept += [asyncio.create_task(by_hand(lock)) for lock in locks]
    for _ in locks:
        await inside.acquire()
    redises.leave()


@scene
async def cancelled_before(redises: Redises) -> None:
    """Tasks that hold something, each with a client that it closes, were cancelled: they are on their way out."""

    async def body(number: int) -> None:
        async with redises.client() as client:
            made_from = Coordinator(client, push="never") if "never" in redises.how else client
            async with AsyncLock(made_from, f"lock {number}"):
                inside.release()
                await for_ever()

    inside = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(body(number)) for number in range(8)]
    for _ in tasks:
        await inside.acquire()
    redises.go()
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    raise SystemExit


@scene
async def a_coordinator_is_left(redises: Redises) -> None:
    """The body of a coordinator is left from inside a lock of it, with another lease held."""
    push = "never" if "never" in redises.how else "auto"
    async with redises.client() as client, Coordinator(client, push=push) as sync:  # type: ignore[arg-type]
        redises.kept.append(await sync.lock("held").acquire())
        async with sync.lock("entered"):
            redises.leave()


# -- the scenes are played ---------------------------------------------------------------------------------


HOWS = ("kill", "pause", "kill never", "pause never")
PLAYS = [[(name, HOWS[(number + turn) % len(HOWS)]) for number, name in enumerate(SCENES)] for turn in range(len(HOWS))]
"""All of them, each scene once in a row, and each way in two scenes of it at least."""
AT_ONCE = 3
"""So many programs run at the same time: most of the time they wait."""


PLAYS.append([(name, "kill uvloop") for name in ("a_wait_timed_out", "an_undo_waits", "bodies")])
FEW = [("bodies", "pause never")]


@pytest.mark.parametrize("plays", [FEW, *(pytest.param(plays, marks=pytest.mark.ci) for plays in PLAYS)])
def test_a_program_ends_soon_and_in_silence_although_redis_is_gone(plays: list[tuple[str, str]]) -> None:
    """F6: killed servers refuse connections, paused ones take them and never answer."""
    if "uvloop" in plays[0][1]:
        pytest.importorskip("uvloop")
    # Of clients that nobody closed: this is about programs that end somehow.
    use = partial(play, end, warnings="ignore::ResourceWarning")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        running = {f"{name}, {how}": threads.submit(use, name, how) for name, how in plays}
    wrong = {which: one.exception() for which, one in running.items() if one.exception() is not None}
    assert not wrong, "\n".join(f"{which}: {error}" for which, error in wrong.items())
    took = {which: float(one.result()) for which, one in running.items()}
    assert max(took.values()) < BOUND, took


def end(name: str, how: str) -> None:
    """Play one scene, and print how long its end took."""
    logging.getLogger("redis_sync_aio").setLevel(logging.CRITICAL)
    redises = Redises(how)
    redises.start()
    try:
        with asyncio.Runner(loop_factory=_uvloop() if "uvloop" in how else None) as runner:
            runner.get_loop().slow_callback_duration = 60  # not what is tested
            runner.run(SCENES[name](redises))  # type: ignore[arg-type]
    except SystemExit:
        print(round(time.monotonic() - redises.gone, 2))
    finally:
        for server in redises.servers:
            if "pause" in how:
                server.resume()
            server.stop()


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop
