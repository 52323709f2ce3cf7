"""P7: which exception leaves the body of a lock, for every body, every end of the lease, every outer cancellation.

The order: the body's own error, the cancellation from outside, LeaseLost, the error of the release. It leaves bare,
and what does not leave is a note on it. FAULTS B7, B8. Races of the same things: test_exceptions_races.py.

A case is a body, a lease and an outer construct. The body is disturbed in one turn of the event loop, first by the
outer construct and then by the loss of its lease; `expected` says what has to leave.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import anyio
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongKeyType

from ..support.body import FAST, assert_undisturbed, for_ever
from ..support.factories import LOCK, SEMAPHORE, Exclusive, Kind
from ..support.inside import hub_of, wait_shielded

NAME = "exceptions"

Then = Callable[[], object]
Request = Callable[[Then], object]
"""Cancel the body from outside, and call the argument in the same turn of the loop, right after."""
Run = Callable[[Request], Awaitable[None]]


class BodyError(Exception):
    """What a body raises by itself."""


class SiblingError(Exception):
    """What the sibling in a task group raises."""


def nothing() -> None:
    """Do nothing."""


# -- the outer constructs ----------------------------------------------------------------------------------


async def nobody(run: Run) -> None:
    """No cancellation from outside."""
    await run(lambda then: then())


async def task_cancel(run: Run) -> None:
    def request(then: Then) -> None:
        task.cancel()
        then()

    task = asyncio.ensure_future(run(request))
    await asyncio.wait([task])
    await task


def scope_request(scope: anyio.CancelScope) -> Request:
    def request(then: Then) -> None:
        scope.deadline = asyncio.get_running_loop().time()  # cancels immediately
        then()

    return request


async def move_on_after(run: Run) -> None:
    with anyio.move_on_after(60) as scope:
        await run(scope_request(scope))


async def fail_after(run: Run) -> None:
    with anyio.fail_after(60) as scope:
        await run(scope_request(scope))


async def asyncio_timeout(run: Run) -> None:
    def request(then: Then) -> None:
        loop = asyncio.get_running_loop()
        timeout.reschedule(loop.time())
        loop.call_soon(then)

    async with asyncio.timeout(60) as timeout:
        await run(request)


NEVER = 1e6
"""Seconds: no other timer is for so long."""


async def wait_for(run: Run) -> None:
    loop: Any = asyncio.get_running_loop()
    due = loop.time() + NEVER

    def request(then: Then) -> None:
        (timer,) = (one for one in loop._scheduled if one.when() >= due and not one.cancelled())
        loop.call_soon(timer._run)  # as if its time were up now
        loop.call_soon(then)

    await asyncio.wait_for(run(request), NEVER)


def called(action: Then, _: object) -> None:
    action()


async def sibling(failing: asyncio.Event, then: list[Then]) -> NoReturn:
    """Fail, and do ``then`` after the group has cancelled the others."""
    await failing.wait()
    task = asyncio.current_task()
    assert task is not None
    for action in then:
        task.add_done_callback(partial(called, action))
    raise SiblingError


def sibling_request(failing: asyncio.Event, thens: list[Then]) -> Request:
    def request(then: Then) -> None:
        thens.append(then)
        failing.set()

    return request


async def task_group(run: Run) -> None:
    failing, thens = asyncio.Event(), list[Then]()

    async def inside() -> None:
        await run(sibling_request(failing, thens))

    async with asyncio.TaskGroup() as group:
        group.create_task(sibling(failing, thens))
        group.create_task(inside())


async def task_group_parent(run: Run) -> None:
    failing, thens = asyncio.Event(), list[Then]()
    async with asyncio.TaskGroup() as group:
        group.create_task(sibling(failing, thens))
        await run(sibling_request(failing, thens))


async def anyio_group(run: Run) -> None:
    failing, thens = asyncio.Event(), list[Then]()

    async def inside() -> None:
        await run(sibling_request(failing, thens))

    async with anyio.create_task_group() as group:
        group.start_soon(sibling, failing, thens)
        group.start_soon(inside)


async def anyio_group_parent(run: Run) -> None:
    failing, thens = asyncio.Event(), list[Then]()
    async with anyio.create_task_group() as group:
        group.start_soon(sibling, failing, thens)
        await run(sibling_request(failing, thens))


Outer = Callable[[Run], Awaitable[None]]
TIMEOUTS: tuple[Outer, ...] = (fail_after, asyncio_timeout, wait_for)
GROUPS: tuple[Outer, ...] = (task_group, task_group_parent, anyio_group, anyio_group_parent)
COUNT_LEFT_BY_ASYNCIO: tuple[Outer, ...] = () if sys.version_info >= (3, 13) else (task_group, task_group_parent)
"""A TaskGroup whose child fails while it waits in its own exit leaves ``cancelling()`` at 1, with any body."""
ANYIO: tuple[Outer, ...] = (move_on_after, fail_after, anyio_group, anyio_group_parent)
"""These cancel again at every await, until their scope is left."""


# -- the bodies --------------------------------------------------------------------------------------------


@dataclass
class Disturbance:
    """What happens to a body from outside."""

    request: Request
    lose: Then
    interrupts: bool

    async def wait(self) -> None:
        """Let it happen, and wait for the interruption if there will be one."""
        asyncio.get_running_loop().call_soon(self.request, self.lose)
        await (for_ever() if self.interrupts else asyncio.sleep(0))

    def at_once(self) -> None:
        """Let it happen now; the interruption comes at the next await."""
        self.lose()
        self.request(nothing)


async def ends(disturbance: Disturbance) -> None:
    await disturbance.wait()


async def raises(disturbance: Disturbance) -> None:
    """The cancellation is in flight when the body's error leaves: it meets the release."""
    disturbance.at_once()
    raise BodyError


async def swallows(disturbance: Disturbance) -> None:
    with suppress(CancelledError):
        await disturbance.wait()


async def raises_in_clean_up(disturbance: Disturbance) -> None:
    try:
        await disturbance.wait()
    finally:
        raise BodyError


Body = Callable[[Disturbance], Awaitable[None]]

# -- the leases --------------------------------------------------------------------------------------------

LEASES = ("fine", "lost", "lost-event", "refused")


async def prepare(kind: Kind, lease: str, redis: Redis) -> None:
    """Make the server agree with what is about to happen."""
    if lease.startswith("lost"):
        await kind.take_over(redis, NAME)
    elif lease == "refused":
        await kind.spoil(redis, NAME)


async def settled(kind: Kind, lease: str, redis: Redis) -> bool:
    """What is ours was released, and what is not was left alone."""
    if lease == "refused":
        return await kind.spoiled(redis, NAME)
    return await kind.token(redis, NAME) == (None if lease == "fine" else b"other")


# -- the table ---------------------------------------------------------------------------------------------


def expected(body: Body, lease: str, outer: Outer) -> type[BaseException] | None:
    """What leaves the hold (P7)."""
    lost = lease.startswith("lost")
    if body in (raises, raises_in_clean_up):
        return BodyError
    if outer is not nobody and (body is ends or (outer in ANYIO and not lost)):
        return CancelledError  # anyio repeats what the body swallowed, when the release waits
    if lost:
        return LeaseLost
    return WrongKeyType if lease == "refused" else None


def expected_outside(
    body: Body, lease: str, outer: Outer, left: type[BaseException] | None
) -> set[type[BaseException]]:
    """What leaves the outer construct, groups taken apart."""
    leaves: set[type[BaseException]] = set() if left is None else {left}
    if body is raises and lease.startswith("lost") and outer is task_group_parent:
        return leaves  # no await up to the end of the group, which so cancels the sibling before it fails
    if outer in TIMEOUTS and left is CancelledError:
        leaves = {TimeoutError}
    elif outer in GROUPS:
        leaves = (leaves - {CancelledError}) | {SiblingError}
    elif outer is move_on_after:
        leaves -= {CancelledError}
    return leaves


def expected_notes(body: Body, lease: str, outer: Outer, left: type[BaseException] | None) -> tuple[str | None, bool]:
    """The note on what left, and whether it has to be there."""
    if lease == "fine" or left not in (BodyError, CancelledError):
        return None, False
    if lease.startswith("lost"):
        return "was lost", True
    release_interrupted = outer in ANYIO or (body is raises and outer is not nobody)
    return "refused", not release_interrupted


def leaves_of(error: BaseException) -> Iterator[type[BaseException]]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield type(error)


@dataclass
class Seen:
    """What was seen where the hold was left."""

    left: BaseException | None = None
    cancelling: int = -1
    prepared: bool = False


def runner(kind: Kind, lock: Exclusive, body: Body, lease: str, outer: Outer, redis: Redis, seen: Seen) -> Run:
    async def run(request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with lock.acquire() as held:
                # In a task of its own: on Python 3.11 redis-py may swallow the cancellation of a timer that is early.
                await wait_shielded(asyncio.ensure_future(prepare(kind, lease, redis)))
                seen.prepared = True
                lose: Then = (lambda: held._grant.lose("taken")) if lease.startswith("lost") else nothing
                await body(Disturbance(request, lose, outer is not nobody or lease == "lost"))
        except BaseException as error:
            seen.left = error
            raise
        finally:
            seen.cancelling = task.cancelling()

    return run


async def leaving(awaitable: Awaitable[None]) -> set[type[BaseException]]:
    try:
        await awaitable
    except BaseException as error:
        return set(leaves_of(error))
    return set()


OUTERS: tuple[Outer, ...] = (nobody, task_cancel, move_on_after, *TIMEOUTS, *GROUPS)
BODIES: tuple[Body, ...] = (ends, raises, swallows, raises_in_clean_up)


def named(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("kind", "way"), [(LOCK, "link"), (LOCK, "polling"), (SEMAPHORE, "link")], indirect=True)
@pytest.mark.parametrize("outer", OUTERS, ids=named)
@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("body", BODIES, ids=named)
async def test_p7(kind: Kind, sync: Coordinator, redis: Redis, body: Body, lease: str, outer: Outer) -> None:
    """P7: the right exception leaves, bare, with the rest as a note, and the task is as it should be afterwards."""
    seen, outside, tries = Seen(), set[type[BaseException]](), 0
    while not seen.prepared:  # on a very busy machine the timer of wait_for may meet the acquire: nothing was seen
        tries += 1
        assert tries <= 20
        await redis.flushall()
        seen = Seen()
        lock = kind.make(sync, NAME, on_lost="event" if lease == "lost-event" else "cancel")
        outside = await leaving(outer(runner(kind, lock, body, lease, outer, redis, seen)))

    left = None if seen.left is None else type(seen.left)
    assert left == expected(body, lease, outer)
    assert outside == expected_outside(body, lease, outer, left)

    note, necessary = expected_notes(body, lease, outer, left)
    notes: list[str] = getattr(seen.left, "__notes__", [])
    assert all(note is not None and note in found for found in notes)
    assert necessary <= len(notes) <= 1

    if outer is nobody:
        assert seen.cancelling == 0
    elif body is not raises:
        assert seen.cancelling >= 1  # never taken back by us
    if outer not in COUNT_LEFT_BY_ASYNCIO:
        await assert_undisturbed()
    await asyncio.sleep(0)
    await wait_until(lambda: settled(kind, lease, redis), FAST, timeout=5)
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


# -- a release that nobody answers -------------------------------------------------------------------------


@pytest_asyncio.fixture
async def own_server() -> AsyncIterator[EmbeddedServer]:
    """A server that the test may stop."""
    async with EmbeddedServer(port=0) as server:
        yield server


@pytest.mark.parametrize("outer", [nobody, task_cancel, asyncio_timeout], ids=named)
@pytest.mark.parametrize("body", BODIES, ids=named)
@pytest.mark.asks_on_release
@pytest.mark.timing
async def test_p7_release_without_an_answer(kind: Kind, own_server: EmbeddedServer, body: Body, outer: Outer) -> None:
    """P7: an unreachable server is a release error like any other."""
    seen = Seen()

    async def run(request: Request) -> None:
        try:
            async with kind.make(sync, NAME):
                own_server.pause()
                await body(Disturbance(request, nothing, outer is not nobody))
        except BaseException as error:
            seen.left = error
            raise

    async with own_server.client() as client:
        sync = Coordinator(client, retry_for=0.3, response_timeout=2.0)
        try:
            async with kind.make(sync, "another"):
                pass  # connecting is not part of what is tried
            await leaving(outer(run))
            await assert_undisturbed()
        finally:
            own_server.resume()
            await sync.aclose()
    usual = expected(body, "refused", outer)
    assert type(seen.left) is (Unreachable if usual is WrongKeyType else usual)
    notes: list[str] = getattr(seen.left, "__notes__", [])
    interrupted = body is raises and outer is not nobody
    assert len(notes) == (0 if interrupted or usual is WrongKeyType else 1)
    assert all("did not answer" in note for note in notes)
