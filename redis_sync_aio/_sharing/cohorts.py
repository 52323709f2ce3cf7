"""All cohorts of one name, as its resource knows them (`_acquire.resource.LocalSharing`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._acquire.waits import Waiter
from .._core.cancellation import undo_in
from .._leases.grant import Grant
from .cohort import Cohort
from .shared_grant import ProcessGrant, Task, TaskGrant

if TYPE_CHECKING:
    from .._core.observers import Observation

MANY = 16
"""Number of cohorts above which unused ones are forgotten."""


class Cohorts:
    """The cohorts of one name, by weight and limit of the requests."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self.all: dict[tuple[int, int], Cohort] = {}
        self._many = MANY

    def cohort(self, request: Request) -> Cohort:
        """Return the cohort of tasks with equal requests."""
        key = (request.weight, request.limit)
        found = self.all.get(key)
        if found is None:
            if len(self.all) >= self._many:  # there may be one for each weight that was ever asked for
                self.all = {known: cohort for known, cohort in self.all.items() if cohort.in_use}
                self._many = max(MANY, 2 * len(self.all))
            found = self.all[key] = Cohort(self._resource, request, self._move)
        return found

    def _move(self, cohort: Cohort, weight: int, limit: int) -> bool:
        """Let ``cohort`` be the one for another limit from now on; return False if another one is."""
        key = (weight, limit)
        found = self.all.get(key)
        if found is not None and found is not cohort and found.in_use:
            return False
        # A new dict: a caller iterates over this one.
        self.all = {known: other for known, other in self.all.items() if other not in (cohort, found)}
        self.all[key] = cohort
        return True

    # -- for the resource ------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a task waits."""
        return any(cohort.waiting for cohort in self.all.values())

    def waiters(self) -> Iterator[Waiter]:
        """Iterate over the futures that the waiting tasks await."""
        for cohort in self.all.values():
            yield from (future for future, *_ in cohort.line if not future.done())

    def refuse_waiter(self, waiter: Waiter, why: Callable[[bool], Exception | None]) -> None:
        """End the wait for ``waiter`` with the error that ``why`` returns, if any; it is told whether that reads."""
        for cohort in list(self.all.values()):
            for future, request, _ in cohort.line:
                if future is waiter and not future.done() and (error := why(request.reads)) is not None:
                    cohort.refuse_one(future, error)
                    return

    def shares(self) -> list[Grant]:
        """Return the parts that tasks hold of the grants that they share."""
        return [share for grant in self._resource.leases if isinstance(grant, ProcessGrant) for share in grant.shares]

    def is_shared(self, grant: Grant) -> bool:
        """Return whether tasks share ``grant``, and hold parts of it."""
        return isinstance(grant, ProcessGrant)

    def list_shares(self) -> None:
        """Index the parts by task if there are many."""
        for cohort in self.all.values():
            cohort.list_shares()

    def on_contention(self) -> None:
        """Go on for a limited time with what is held, perhaps by several cohorts: others wait at the server."""
        for cohort in self.all.values():
            cohort.on_contention()

    def resized(self, old: int, new: int) -> None:
        """Take note of another limit of the permits."""
        for cohort in self.all.values():
            cohort.resized(old, new)

    def rest_ends(self) -> bool:
        """Give back what is held and no task has; return whether there was anything."""
        resting = [(cohort, grant) for cohort in self.all.values() for grant in cohort.resting]
        for cohort, grant in resting:
            cohort.give_back(grant)
        return bool(resting)

    def reroute(self) -> None:
        """Stop handing over: contention notices of the server would not arrive."""
        for cohort in list(self.all.values()):
            for grant in list(cohort.resting):
                cohort.give_back(grant)
            for grant in list(cohort.grants):
                cohort.part_with(grant)

    def stop(self) -> None:
        """Check before each hand-over whether it is still allowed (`Cohort.thread`)."""
        for cohort in self.all.values():
            cohort.thread = 0

    def give_up(self, error: Exception) -> None:
        """End all waits with ``error``."""
        for cohort in self.all.values():
            cohort.give_up(error)


def cohort_of(resource: Resource, request: Request) -> Cohort:
    """Return the cohort of tasks with equal requests for ``resource``; the first call allows its tasks to share."""
    cohorts = resource.sharing
    if cohorts is None:
        cohorts = resource.sharing = Cohorts(resource)
    assert isinstance(cohorts, Cohorts)
    return cohorts.cohort(request)


async def acquire_shared(
    cohort: Cohort, request: Request, task: Task | None, observation: Observation | None = None
) -> TaskGrant | None:
    """Acquire for ``task``, the current one; None when ``request.wait`` is False and it is taken."""
    while (answer := cohort.enter(request, task)) is None:
        await asyncio.sleep(0)
        cohort.hub.check()
        # The name may have been forgotten meanwhile, and then made again, as another object.
        cohort = cohort_of(cohort.hub.resource(cohort.resource.keys, cohort.resource), request)
    if observation is not None:
        observation.waits = not answer.done()
    try:
        lease = await answer
    except BaseException:
        undo_in(cohort.loop, partial(cohort.task_cancelled, answer, request))
        del answer  # else it keeps the traceback, and so what the caller acquires next, in a cycle
        raise
    if lease is not None and task is not None:
        by = lease.acquirer = ref(task)
        lease.root = getattr(task.get_coro(), "cr_code", None)
        if cohort.listed:
            cohort.resource.leases.note(by, lease)
    return lease
