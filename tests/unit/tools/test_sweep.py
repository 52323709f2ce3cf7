"""A sweep cancels at every await."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.support.sweep import WAYS, Outcome, Stepper, Way, sweep


async def ignore(outcome: Outcome[Any]) -> None:
    """Nothing can be left behind."""


def soon(value: Any = None) -> asyncio.Future[Any]:
    """A future that is done some turns of the loop later."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        elif not future.done():
            future.set_result(value)

    turn(3)
    return future


class TestStepper:
    async def test_counts_every_suspension(self) -> None:
        async def operation() -> str:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            await future  # done already: none
            await asyncio.gather(soon(), soon())
            async with asyncio.timeout(5):
                return str(await soon("value"))

        points: list[tuple[int, bool]] = []
        stepper = Stepper(operation(), lambda n, waiting: points.append((n, waiting is None)))
        assert await stepper == "value"
        assert points == [(1, True), (2, False), (3, False), (4, False)]
        assert (stepper.points, stepper.cancelled_at) == (4, None)


class TestSweep:
    async def test_a_correct_operation_passes(self) -> None:
        held: set[object] = set()

        async def operation() -> object:
            await asyncio.sleep(0)
            token = object()
            held.add(token)
            try:
                await soon()
                await asyncio.sleep(0.001)
            except BaseException:
                held.discard(token)
                raise
            return token

        async def check(outcome: Outcome[object]) -> None:
            held.discard(outcome.value)
            assert not held

        result = await sweep(operation, check)
        assert result.cancellations == {"task": 3, "same_turn": 3, "scope": 3}
        assert result.swallowed == []
        assert len(result.outcomes) == 12
        assert [one.value is None for one in result.outcomes] == [True, True, True, False] * 3

    @pytest.mark.parametrize("way", WAYS)
    async def test_the_same_turn_way_makes_result_and_cancellation_meet(self, way: Way) -> None:
        states: list[str] = []

        async def operation() -> None:
            future = soon("a result")
            try:
                await future
            except asyncio.CancelledError:
                states.append("cancelled" if future.cancelled() else future.result())
                raise

        await sweep(operation, ignore, ways=[way])
        assert states == ["a result" if way == "same_turn" else "cancelled"]

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_swallowed_cancellation_is_caught(self, way: Way) -> None:
        async def operation() -> str:
            await asyncio.sleep(0)
            try:
                await soon()
            except asyncio.CancelledError:
                return "as if nothing were"
            return "done"

        with pytest.raises(AssertionError, match=rf"swallowed: way '{way}', suspension point n=2"):
            await sweep(operation, ignore, ways=[way])
        result = await sweep(operation, ignore, ways=[way], strict=False)
        assert [(one.way, one.n, one.value) for one in result.swallowed] == [(way, 2, "as if nothing were")]
        assert result.cancellations == {way: 2}

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_leak_is_caught_by_the_check(self, way: Way) -> None:
        held: list[str] = []

        async def operation() -> None:
            await asyncio.sleep(0)
            held.append("it")
            await soon()
            held.remove("it")

        async def check(outcome: Outcome[None]) -> None:
            assert not held

        with pytest.raises(AssertionError) as caught:
            await sweep(operation, check, ways=[way])
        assert caught.value.__notes__ == [f"in the check after: way '{way}', suspension point n=2"]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("first", ["give back", "wait"])
    async def test_a_clean_up_that_can_be_interrupted_is_caught_by_a_second_cancellation(
        self, way: Way, first: str
    ) -> None:
        held: list[str] = []

        async def operation() -> None:
            held.append("it")
            try:
                await soon()
            except asyncio.CancelledError:
                if first == "give back":
                    held.clear()
                with anyio.CancelScope(shield=True):
                    await soon()
                held.clear()
                raise
            held.clear()

        async def check(outcome: Outcome[None]) -> None:
            assert not held

        assert (await sweep(operation, check, ways=[way])).cancellations == {way: 1}
        if first == "give back":
            result = await sweep(operation, check, ways=[way], twice=True)
            assert [(one.cancelled, one.twice) for one in result.outcomes] == [(True, True), (False, False)]
        else:
            with pytest.raises(AssertionError) as caught:
                await sweep(operation, check, ways=[way], twice=True)
            assert caught.value.__notes__[0].endswith("n=1, cancelled twice")

    @pytest.mark.parametrize("goes_on", [False, True])
    async def test_a_scope_that_meets_a_time_out(self, goes_on: bool) -> None:
        """The timeout cancels the same await; who ends without another one was over before. Who goes on is not."""

        async def operation() -> str:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):  # which is up in the next turn, before the sweep cancels there
                    await asyncio.get_running_loop().create_future()
            if goes_on:
                with contextlib.suppress(asyncio.CancelledError):
                    await soon()
            return "the time was up"

        met = (await sweep(operation, ignore, ways=["scope"], strict=False)).outcomes[0]
        assert (met.value, met.missed, met.swallowed) == ("the time was up", not goes_on, goes_on)
