"""The states of a grant, and the exits of bodies that have failed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from weakref import WeakMethod

from .._core.cancellation import exit_timeout_of, give_up_on, outcome_of


class LeaseState(Enum):
    """The state of a grant."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    LOST = "lost"


ENDLESS = math.inf  # a name of a module is found sooner than its attribute, and each grant needs it
HELD, RELEASED = LeaseState.HELD, LeaseState.RELEASED


class Exits:
    """The exits of failed bodies of one coordinator. They wait together for the answers to their releases."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        """The time in seconds for which the first of them waits."""
        self._given_up: WeakMethod[Callable[[], bool]] | None = None
        """True if the release that was given up on last has no answer."""

    def timeout_for(self, error: BaseException) -> float:
        """Return for how long ``error`` waits for the answer to a release.

        It does not wait while a release that another exit gave up on has no answer. For an error that leaves a task
        group makes that cancel its tasks, and comes out as another error; with each of these the wait would begin
        again. (In a cluster the server of this release may be another one, which answers: then no request waits.)
        """
        unanswered = None if self._given_up is None else self._given_up()
        if unanswered is not None and unanswered():
            return 0.0
        return exit_timeout_of(error, self.timeout)

    def give_up_on(self, release: str, unanswered: Callable[[], bool], error: BaseException) -> None:
        """Note that ``error`` does not wait any longer for the release of that name, which continues.

        ``unanswered``: a method that returns True as long as it has no answer. Its object is not kept.
        """
        self._given_up = WeakMethod(unanswered)
        give_up_on(release, error)

    async def in_time(
        self, outcome: asyncio.Future[None], release: str, unanswered: Callable[[], bool], error: BaseException
    ) -> None:
        """Wait for the ``outcome`` of a release, in time; else `give_up_on` it and raise ``error``, which is `leaving`.

        At its end `asyncio.run` cancels all tasks, and waits for whatever they await in their clean-up.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_for(error)):
                return await outcome_of(outcome)
        self.give_up_on(release, unanswered, error)
        raise error
