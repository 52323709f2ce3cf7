"""P1: `lock.wrap` and `synchronized` (of locks only): calls run one at a time, and everything else passes through."""

from __future__ import annotations

import asyncio
import functools
import textwrap
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from redis_sync_aio import AcquireTimeout, Coordinator, synchronized

from ..support.factories import Exclusive, Kind, holder

NAME = "decorators"


class BodyError(Exception):
    """What a body raises by itself."""


@pytest.fixture
def lock(kind: Kind, sync: Coordinator) -> Exclusive:
    return kind.make(sync, NAME)


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


class Called:
    """Called as a coroutine function is."""

    async def __call__(self, number: int) -> int:
        return number


async def _number(number: int) -> int:
    return number


async def test_what_wrap_accepts(lock: Exclusive) -> None:
    """What is a coroutine function, or is called as one."""
    assert await lock.wrap(functools.partial(_number, 3))() == 3
    assert await lock.wrap(Called())(4) == 4


async def _generator() -> AsyncIterator[int]:
    yield 1


NOT_WRAPPED: tuple[Any, ...] = (
    print, None, "x", textwrap.dedent, lambda: None, lambda: _number(1), Called, _generator,
)  # fmt: skip


async def test_wrap_takes_coroutine_functions_only(lock: Exclusive) -> None:
    """TypeError at decoration, not after the body has run."""
    for function in NOT_WRAPPED:
        with pytest.raises(TypeError, match="not a coroutine function"):
            lock.wrap(function)


async def test_synchronized(sync: Coordinator) -> None:
    """The name is made from the arguments, defaults included: equal names exclude each other, others do not."""
    inside: dict[str, int] = {}
    most: dict[str, int] = {}
    together: list[int] = []

    @synchronized(sync, "user:{user}:{kind}", timeout=5)
    async def charge(user: int, kind: str = "a") -> None:
        key = f"user:{user}:{kind}"
        assert await sync.lock(key).locked()
        inside[key] = inside.get(key, 0) + 1
        most[key] = max(most.get(key, 0), inside[key])
        together.append(sum(inside.values()))
        await asyncio.sleep(0.01)
        inside[key] -= 1

    await asyncio.gather(charge(1), charge(1), charge(user=1, kind="a"), charge(2), charge(1, "b"))
    assert most == {"user:1:a": 1, "user:2:a": 1, "user:1:b": 1}
    assert max(together) > 1


async def test_synchronized_in_time(sync: Coordinator) -> None:
    @synchronized(sync, NAME, timeout=0)
    async def never() -> NoReturn:
        raise AssertionError

    async with sync.lock(NAME):
        with pytest.raises(AcquireTimeout):
            await never()


@pytest.mark.parametrize("name", ["user:{nobody}", "user:{0}", "user:{}", "{user.id}{other[0]}"])
async def test_synchronized_with_a_bad_name(sync: Coordinator, name: str) -> None:
    """ValueError at decoration, not at the first call."""

    async def function(user: int) -> None: ...

    with pytest.raises(ValueError):
        synchronized(sync, name)(function)


async def test_errors_name_the_template(sync: Coordinator) -> None:
    with pytest.raises(ValueError, match=r"name 'user:\{user' is not a template: expected '}'.*double other braces"):
        synchronized(sync, "user:{user")

    @synchronized(sync, "user:{user.number}")
    async def charge(user: str) -> None:
        pass

    with pytest.raises(AttributeError, match="number") as caught:
        await charge("bob")
    assert "'user:{user.number}'" in caught.value.__notes__[0]
