"""P7: which exception leaves the body of a lock, for every body, every end of the lease, every outer cancellation.

The order: the body's own error, the cancellation from outside, LeaseLost, the error of the release. It leaves bare,
and what does not leave is a note on it. What meets in one turn of the event loop: test_exceptions_races.py.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

import anyio
import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncReentrantLock,
    Coordinator,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongKeyType
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, assert_undisturbed, for_ever
from ..support.inside import hub_of, wait_shielded
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import (
    LOCK,
    MULTI,
    MULTI_IN_ONE_SLOT,
    REDLOCK,
    REENTRANT,
    ROBUST,
    SEMAPHORE,
    WRITER,
    Primitive,
)
from ..support.wired import wired
from .exception_races import NAME, lose_now, this_task

Then: TypeAlias = Callable[[], object]
Request: TypeAlias = Callable[[Then], object]
"""Cancel the body from outside, and call the argument in the same turn of the loop, right after."""
Run: TypeAlias = Callable[[Request], Awaitable[None]]
Outer: TypeAlias = Callable[[Run], Awaitable[None]]


class BodyError(Exception):
    """Raised by a body itself."""


class SiblingError(Exception):
    """Raised by the sibling in a task group."""


# -- the outer constructs ----------------------------------------------------------------------------------


async def nobody(run: Run) -> None:
    """Do not cancel."""
    await run(lambda then: then())


async def task_cancel(run: Run) -> None:
    def request(then: Then) -> None:
        task.cancel()
        then()

    task = asyncio.ensure_future(run(request))
    await task


async def asyncio_timeout(run: Run) -> None:
    def request(then: Then) -> None:
        timeout.reschedule(0)
        asyncio.get_running_loop().call_soon(then)

    async with asyncio.timeout(60) as timeout:
        await run(request)


async def task_group(run: Run) -> None:
    async def fail() -> NoReturn:
        await failing.wait()
        raise SiblingError

    def request(then: Then) -> None:
        sibling.add_done_callback(lambda _: then())  # after the group has cancelled its parent
        failing.set()

    failing = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        sibling = group.create_task(fail())
        await run(request)


async def anyio_scope(run: Run) -> None:
    def request(then: Then) -> None:
        scope.cancel()
        then()

    with anyio.CancelScope() as scope:
        await run(request)


BECOMES: dict[Outer, type[BaseException] | None] = {
    task_cancel: CancelledError,
    asyncio_timeout: TimeoutError,
    task_group: SiblingError,
    anyio_scope: None,
}
"""What leaves the construct when its cancellation leaves the hold."""

# -- the bodies --------------------------------------------------------------------------------------------


@dataclass
class Disturbance:
    """A cancellation from outside, or none, and the loss of the lease right after it, or none."""

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
        self.request(lambda: None)


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


Body: TypeAlias = Callable[[Disturbance], Awaitable[None]]

# -- the primitives ----------------------------------------------------------------------------------------


@asynccontextmanager
async def nested(sync: Coordinator, name: str, **options: Any) -> AsyncIterator[BaseLease]:
    """A reentrant lock whose body is inside another body of the same task."""
    lock = AsyncReentrantLock(sync, name, **options)
    async with lock, lock as inner:
        yield inner


ENTERS = {it.label: it for it in (LOCK, SEMAPHORE, ROBUST, REENTRANT, MULTI, MULTI_IN_ONE_SLOT, REDLOCK, WRITER)}
ENTERS["nested"] = replace(REENTRANT, label="nested", build=nested)
OTHERS = (f"{NAME} and that", f"{{{NAME}}} and that")

# -- the table ---------------------------------------------------------------------------------------------

LEASES = ("fine", "lost", "lost, told by event", "refused")
B, C, L, W = BodyError, CancelledError, LeaseLost, WrongKeyType
LEAVES: dict[Body, dict[str, tuple[type[BaseException] | None, ...]]] = {
    # if there is no cancellation, if there is one, if it is anyio's, which comes again at each await
    ends: {"fine": (None, C, C), "lost": (L, C, C), "refused": (W, C, C)},
    swallows: {"fine": (None, None, C), "lost": (L, L, L), "refused": (W, W, C)},
    raises: {"fine": (B, B, B), "lost": (B, B, B), "refused": (B, B, B)},
    raises_in_clean_up: {"fine": (B, B, B), "lost": (B, B, B), "refused": (B, B, B)},
}
NOTES = {"lost": "was lost", "refused": "refused"}


@dataclass
class Seen:
    """The exception that left the hold, and the task's count of cancellations then."""

    left: BaseException | None = None
    cancelling: int = 0

    @property
    def kind(self) -> type[BaseException] | None:
        return None if self.left is None else type(self.left)

    @property
    def notes(self) -> list[str]:
        return getattr(self.left, "__notes__", [])


@asynccontextmanager
async def watched(seen: Seen) -> AsyncIterator[None]:
    try:
        yield
    except BaseException as error:
        seen.left = error
        raise
    finally:
        seen.cancelling = this_task().cancelling()


async def leaving(awaitable: Awaitable[None]) -> set[type[BaseException] | None]:
    """Return the types of what leaves it, groups taken apart; None if nothing does."""
    try:
        await awaitable
    except BaseExceptionGroup as group:
        return {type(error) for error in group.exceptions}
    except BaseException as error:
        return {type(error)}
    return {None}


@pytest.mark.parametrize(
    ("enter", "way"), [*((label, "link") for label in ENTERS), ("lock", "polling")], indirect=["way"]
)
@pytest.mark.parametrize("outer", [nobody, *BECOMES])
@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("body", LEAVES)
async def test_the_right_exception_leaves_bare_with_the_rest_as_a_note(
    sync: Coordinator, redis: Redis, enter: str, body: Body, lease: str, outer: Outer
) -> None:
    """And the task is as it should be, nothing of the lease is left, and another's key is left alone."""
    kind = ENTERS[enter]
    fate, by_event = lease.split(",")[0], "event" in lease
    seen = Seen()

    async def prepare() -> None:
        if fate == "lost":
            await kind.take_over(redis, NAME)
        elif fate == "refused":
            await kind.spoil(redis, NAME)

    async def run(request: Request) -> None:
        async with watched(seen), kind.make(sync, NAME, on_lost="event" if by_event else "cancel") as held:
            await wait_shielded(asyncio.ensure_future(prepare()))
            lose: Then = partial(lose_now, held) if fate == "lost" else lambda: None
            interrupts = outer is not nobody or (fate == "lost" and not by_event)
            await body(Disturbance(request, lose, interrupts))

    outside = await leaving(outer(run))
    assert seen.kind == LEAVES[body][fate][(outer is not nobody) + (outer is anyio_scope)]
    if seen.kind is CancelledError:
        assert outside == {BECOMES[outer]}
    elif seen.kind is not None:
        assert seen.kind in outside

    met_the_release = outer is anyio_scope or (body is raises and outer is not nobody)
    if fate == "fine" or seen.kind not in (BodyError, CancelledError):
        assert seen.notes == []
    elif fate == "lost" or not met_the_release:
        assert len(seen.notes) == 1
    assert all(NOTES[fate] in note for note in seen.notes), seen.notes
    assert len(seen.notes) <= 1

    if outer is nobody:
        assert seen.cancelling == 0
    elif body is not raises:
        assert seen.cancelling >= 1  # never taken back by us
    if outer is not task_group:  # on Python < 3.13 that leaves a count itself
        await assert_undisturbed()

    async def settled() -> bool:
        if fate == "refused":
            as_it_was = await kind.spoiled(redis, NAME)
        else:
            as_it_was = await kind.token(redis, NAME) == (b"other" if fate == "lost" else None)
        return as_it_was and not await redis.exists(*OTHERS)

    await asyncio.sleep(0)
    await wait_until(settled, FAST, timeout=5)
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


@pytest.mark.parametrize("outer", [nobody, task_cancel, asyncio_timeout])
@pytest.mark.parametrize("body", LEAVES)
@pytest.mark.asks_on_release
async def test_a_release_without_an_answer_is_a_release_error_like_any_other(
    kind: Primitive, server: EmbeddedServer, body: Body, outer: Outer
) -> None:
    seen = Seen()
    async with wired(server, kind=kind, retry_for=0.3, response_timeout=2.0) as w:

        async def run(request: Request) -> None:
            async with watched(seen), w.lock():
                w.proxy.black_hole = True
                await body(Disturbance(request, lambda: None, outer is not nobody))

        await leaving(outer(run))
        await assert_undisturbed()
        w.proxy.black_hole = False
    usual = LEAVES[body]["refused"][outer is not nobody]
    assert seen.kind is (Unreachable if usual is WrongKeyType else usual)
    interrupted = body is raises and outer is not nobody
    assert len(seen.notes) == (0 if interrupted or usual is WrongKeyType else 1)
    assert all("did not answer" in note for note in seen.notes), seen.notes
