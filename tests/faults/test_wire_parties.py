"""P4 for events and latches: whatever happens to a command or its answer, a count counts once, and a waiter gets in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from redis_sync_aio import AsyncCountDownLatch, AsyncEvent, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import SEMAPHORE
from ..support.inside import parties
from ..support.proxy import DELAY, Action, anything, script
from ..support.timed import failures
from ..support.wire_sweep import ANSWERS, WIRE
from ..support.wired import ACQUIRE, COUNT_DOWN, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

COUNT = script(COUNT_DOWN.sha)
FAULTS = WIRE | ANSWERS

Operation = Callable[[Wired, str, Action], Awaitable[object]]


async def count_down(w: Wired, name: str, action: Action) -> None:
    mine, theirs = AsyncCountDownLatch(w.sync, name, 5), AsyncCountDownLatch(w.other, name, 5)
    rule = w.proxy.on(COUNT, action)
    assert await mine.count_down() == await theirs.count() == 4
    assert await mine.count_down(2) == await theirs.count() == 2
    assert rule.acted


async def set_again(w: Wired, name: str, action: Action) -> None:
    """A set that is repeated has one effect: when it has been answered, a clear is the last word."""
    mine, theirs = AsyncEvent(w.sync, name), AsyncEvent(w.other, name)
    rule = w.proxy.on(COUNT, action)
    await mine.set()
    assert await theirs.is_set()
    await theirs.clear()
    assert not await mine.is_set()
    assert rule.acted


async def wait(w: Wired, name: str, action: Action) -> None:
    """Also when the gate opened and closed before the request was repeated."""
    mine, theirs = AsyncEvent(w.sync, name), AsyncEvent(w.other, name)
    rule = w.proxy.on(ACQUIRE, action)
    waiting = asyncio.create_task(mine.wait())

    async def there() -> bool:
        return waiting.done() or await w.direct.zcard(f"{{{name}}}:event:queue") == 1

    await wait_until(there, SOON, timeout=15)
    await theirs.set()
    await theirs.clear()
    assert await waiting
    assert rule.acted


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("operation", [count_down, set_again, wait])
async def test_sweep(server: EmbeddedServer, operation: Operation, mode: str) -> None:
    async def run(fault: str) -> None:
        name = f"{operation.__name__}, {mode}: {fault}"
        async with wired(server, mode, name=name, kind=SEMAPHORE) as w, asyncio.timeout(60):
            await operation(w, name, FAULTS[fault])

    wrong = await failures(list(FAULTS), run)
    assert not wrong, "\n".join(f"{fault}: {error!r}" for fault, error in wrong)


async def test_a_waiter_gets_in_however_late_the_push_comes(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the event is cleared before, and the server has forgotten whom it let in."""
    monkeypatch.setattr(parties, "REMEMBERED", 0.2)
    async with wired(server, name="late", kind=SEMAPHORE, response_timeout=30) as w, asyncio.timeout(60):
        late, sound = AsyncEvent(w.sync, "late"), AsyncEvent(w.other, "late")
        waiting = asyncio.create_task(late.wait())

        async def there() -> bool:
            return await w.direct.zcard("{late}:event:queue") == 1

        await wait_until(there, SOON, timeout=30)
        rule = w.proxy.on_push(anything, DELAY(1.0))
        await sound.set()
        await sound.clear()
        assert await waiting
        assert rule.acted


async def test_a_count_without_an_answer_may_have_counted(server: EmbeddedServer) -> None:
    async with wired(server, retry_for=0.4) as w:
        w.proxy.on(COUNT, WIRE["black-holed request"], times=99)
        with pytest.raises(Unreachable):
            await AsyncCountDownLatch(w.sync, "unheard", 1).count_down()
