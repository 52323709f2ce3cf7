"""P1: `lock.wrap` and `synchronized` (of locks only): calls run one at a time, and everything else passes through."""

from __future__ import annotations

import asyncio
import functools
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, synchronized, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, waits
from ..support.primitives import Exclusive, Primitive, holder
from ..support.wired import wired

NAME = "decorators"


class BodyError(Exception):
    """What a body raises by itself."""


@pytest.fixture
def lock(kind: Primitive, sync: Coordinator) -> Exclusive:
    made: Exclusive = kind.make(sync, NAME)
    return made


async def test_wrap(lock: Exclusive) -> None:
    """Calls run one at a time; name, arguments, result and errors pass through; concurrent calls are fine."""
    running: list[int] = []

    @lock.wrap
    async def double(number: int, *, fail: bool = False) -> int:
        """Double it."""
        running.append(number)
        await asyncio.sleep(0)
        assert running == [number]
        running.clear()
        if fail:
            raise BodyError
        return 2 * number

    assert (getattr(double, "__name__", ""), double.__doc__) == ("double", "Double it.")
    assert await asyncio.gather(*(double(n) for n in range(8))) == [2 * n for n in range(8)]
    with pytest.raises(BodyError):
        await double(1, fail=True)
    assert await holder(lock) is None


async def _number(number: int) -> int:
    return number


async def _generator() -> AsyncIterator[int]:
    yield 1


class Called:
    """Called as a coroutine function is."""

    async def __call__(self, number: int) -> int:
        return number


async def test_wrap_takes_what_is_called_as_a_coroutine_function(lock: Exclusive) -> None:
    """Anything else is a TypeError at decoration, not after the body has run."""
    assert await lock.wrap(functools.partial(_number, 3))() == 3
    assert await lock.wrap(Called())(4) == 4
    bad: Any
    for bad in (print, None, "x", textwrap.dedent, lambda: None, lambda: _number(1), Called, _generator):
        with pytest.raises(TypeError, match="not a coroutine function"):
            lock.wrap(bad)


async def test_synchronized(sync: Coordinator) -> None:
    """The name is made from the arguments, defaults included: equal names exclude each other, others do not."""
    running, end = asyncio.Event(), asyncio.Event()
    done: list[tuple[int, str]] = []

    @synchronized(sync, "user:{user}:{kind}", timeout=60)
    async def charge(user: int, kind: str = "a", *, lasts: bool = False) -> None:
        assert await sync.lock(f"user:{user}:{kind}").locked()
        if lasts:
            running.set()
            await end.wait()
        done.append((user, kind))

    first = asyncio.create_task(charge(1, lasts=True))
    await running.wait()
    same = asyncio.create_task(charge(user=1, kind="a"))
    await charge(2)
    await charge(1, "b")
    await wait_until(waits(sync.lock("user:1:a")), FAST, timeout=5)
    assert done == [(2, "a"), (1, "b")]
    end.set()
    await asyncio.gather(first, same)
    assert done == [(2, "a"), (1, "b"), (1, "a"), (1, "a")]


async def test_a_name_may_refer_to_all_of_an_argument(sync: Coordinator) -> None:
    """Attributes, items, conversions, and arguments inside a format specification."""

    @synchronized(sync, "{user.__class__.__name__}:{user.real:0{width}}:{kinds[1]!r}", timeout=0)
    async def charge(user: int, width: int, *kinds: str) -> None:
        assert await sync.lock("int:007:'b'").locked()

    await charge(7, 3, "a", "b")


# -- the client of the call, and what happens to a call that finds the lock busy ---------------------------


async def test_the_client_is_asked_for_at_each_call(sync: Coordinator, redis: Redis) -> None:
    """So a module can be imported before there is a client. What gives it is checked at decoration."""
    made: list[Redis | Coordinator] = []

    @synchronized(lambda: made[-1], NAME, timeout=0)
    async def report() -> bool:
        return await sync.lock(NAME).locked()

    assert made == []
    for client in (sync, redis):
        made.append(client)
        assert await report()
    made.append("redis://")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a client, not an address"):
        await report()
    made.clear()
    with pytest.raises(IndexError):
        await report()

    async def late() -> Coordinator:
        return sync

    bad: Any
    options: Any
    for bad, options in ((late, {}), (lambda: sync, {"ttl": -1}), (lambda: sync, {"on_busy": "wait"})):
        with pytest.raises((TypeError, ValueError)):
            synchronized(bad, NAME, **options)
    with pytest.raises(ValueError):
        synchronized(lambda: sync, "torn}{")


@pytest.mark.parametrize("timeout", [None, 0, 5])
async def test_a_busy_call_is_skipped_or_raises(sync: Coordinator, timeout: float | None) -> None:
    """If it is skipped it returns None, and the function is not called."""
    called: list[int] = []

    async def report(number: int) -> int:
        called.append(number)
        return number

    skipping = synchronized(sync, NAME, timeout=timeout, on_busy="skip")(report)
    lease = await sync.lock(NAME).acquire()
    assert await skipping(1) is None
    if timeout is not None:
        with pytest.raises(AcquireTimeout):
            await synchronized(sync, NAME, timeout=timeout)(report)(1)
    assert (await sync.lock(NAME).statistics()).waiting == 0
    await lease.release()
    assert await skipping(2) == 2
    assert called == [2]


async def test_only_a_busy_lock_is_a_reason_to_skip(server: EmbeddedServer) -> None:
    """The timeout of another lock inside the function comes out; so does one that means that Redis did not answer."""
    async with wired(server, retry_for=60) as w:

        async def within() -> bool:
            async with w.sync.lock("inner").acquire(timeout=0):
                return True

        report = synchronized(w.sync, NAME, timeout=60, on_busy="skip")(within)
        assert await report()
        async with w.sync.lock("inner"):
            with pytest.raises(AcquireTimeout) as caught:
                await report()
            assert caught.value.name == "inner"
        w.proxy.black_hole = True
        with pytest.raises(AcquireTimeout, match="Redis has not answered yet") as caught:
            await synchronized(w.sync, NAME, timeout=0.2, on_busy="skip")(within)()
        assert not caught.value.answered
        w.proxy.black_hole = False


async def test_errors_name_the_template(sync: Coordinator) -> None:
    """A bad template is a ValueError at decoration, not at the first call."""

    async def function(user: int) -> None: ...

    for bad in ("user:{nobody}", "user:{0}", "user:{}", "{user.id}{other[0]}", "{user:{width}}", "{user!z}", "{user.}",
                "{user[0]x}", "{user[}", "{user!}", "{user:{user:{user}}}"):  # fmt: skip
        with pytest.raises(ValueError):
            synchronized(sync, bad)(function)
    with pytest.raises(ValueError, match=r"name 'user:\{user' is not a template: expected '}'.*double other braces"):
        synchronized(sync, "user:{user")

    @synchronized(sync, "user:{user.number}")
    async def charge(user: str) -> None:
        pass

    with pytest.raises(AttributeError, match="number") as caught:
        await charge("bob")
    assert "'user:{user.number}'" in caught.value.__notes__[0]
