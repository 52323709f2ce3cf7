"""P4 for barriers: whatever happens to a command, its answer or a push, all parties pass once, each with its rank."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from redis_sync_aio import AsyncBarrier, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import SEMAPHORE
from ..support.inside import parties
from ..support.proxy import DELAY_REPLY, anything, script
from ..support.timed import failures
from ..support.wire_sweep import ANSWERS, PUSHES, WIRE
from ..support.wired import BREAK, JOIN, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

FAULTS = WIRE | ANSWERS


def joined(barrier: AsyncBarrier) -> Callable[[], Awaitable[bool]]:
    """Return a condition: one party waits."""

    async def there() -> bool:
        return await barrier.n_waiting() == 1

    return there


async def meet(w: Wired, faulty: AsyncBarrier, sound: AsyncBarrier) -> None:
    """Two rounds: in the first one the faulty party joins first, in the second one last."""
    first = asyncio.create_task(faulty.wait())

    async def there() -> bool:
        return first.done() or await sound.n_waiting() == 1

    await wait_until(there, SOON, timeout=30)
    assert {await sound.wait(), await first} == {0, 1}
    second = asyncio.create_task(sound.wait())
    await wait_until(joined(sound), SOON, timeout=30)
    assert {await faulty.wait(), await second} == {0, 1}
    assert (await sound.n_waiting(), await sound.broken()) == (0, False)


async def test_a_party_passes_however_late_the_answer_comes(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have passed with it. If it joined again, it would wait for those that do not come again."""
    monkeypatch.setattr(parties, "REMEMBERED", 0.2)
    async with wired(server, name="late", kind=SEMAPHORE, response_timeout=30) as w, asyncio.timeout(60):
        late, sound = AsyncBarrier(w.sync, "late", 2), AsyncBarrier(w.other, "late", 2)
        assert not await late.broken()  # its connection is there
        rule = w.proxy.on(script(JOIN.sha), DELAY_REPLY(1.0))
        first = asyncio.create_task(sound.wait())
        await wait_until(joined(sound), SOON, timeout=30)
        assert (await late.wait(), await first) == (1, 0)
        assert rule.acted


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("skip", [0, 1])
async def test_joining(server: EmbeddedServer, mode: str, skip: int) -> None:
    """At the first or the second command that joins."""

    async def run(fault: str) -> None:
        name = f"barrier, {mode}, {skip}: {fault}"
        async with wired(server, mode, name=name, kind=SEMAPHORE) as w, asyncio.timeout(60):
            rule = w.proxy.on(script(JOIN.sha), FAULTS[fault], skip=skip)
            await meet(w, AsyncBarrier(w.sync, name, 2), AsyncBarrier(w.other, name, 2))
            assert rule.acted

    wrong = await failures(list(FAULTS), run)
    assert not wrong, "\n".join(f"{fault}: {error!r}" for fault, error in wrong)


async def test_the_push_that_lets_it_pass(server: EmbeddedServer) -> None:
    """A pass that is not heard of is found when the party asks again."""

    async def run(fault: str) -> None:
        name = f"barrier push: {fault}"
        async with wired(server, name=name, kind=SEMAPHORE) as w, asyncio.timeout(60):
            rule = w.proxy.on_push(anything, PUSHES[fault])
            await meet(w, AsyncBarrier(w.sync, name, 2, ttl=6), AsyncBarrier(w.other, name, 2, ttl=6))
            assert rule.acted

    wrong = await failures(list(PUSHES), run)
    assert not wrong, "\n".join(f"{fault}: {error!r}" for fault, error in wrong)


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_a_reset_that_is_repeated_sends_nobody_away(server: EmbeddedServer, mode: str) -> None:
    """When a reset has been answered, no copy of it meets those that come afterwards."""

    async def run(fault: str) -> None:
        name = f"reset, {mode}: {fault}"
        async with wired(server, mode, name=name, kind=SEMAPHORE) as w, asyncio.timeout(60):
            faulty, sound = AsyncBarrier(w.sync, name, 2), AsyncBarrier(w.other, name, 2)
            await sound.abort()
            rule = w.proxy.on(script(BREAK.sha), FAULTS[fault])
            await faulty.reset()
            assert rule.acted
            await meet(w, faulty, sound)

    wrong = await failures(list(FAULTS), run)
    assert not wrong, "\n".join(f"{fault}: {error!r}" for fault, error in wrong)
