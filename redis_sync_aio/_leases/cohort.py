"""Local sharing: tasks of one process queue behind few tickets, and hand grants on among themselves.

The technique is lock cohorting (Dice, Marathe, Shavit, PPoPP 2012).

The rule. A *process grant* is what the server granted to this process. It goes from task to task in the order in which
they asked, without a command, for as long as no other process waits at the server. The server reports the first other
waiter by a message (CONTENDED). From then on the grant is handed on ``burst`` times at most, and not after ``slice``
seconds. Then it goes back to the server, which grants it to the first in its queue. Tasks of this process that still
wait come after all clients that waited there by then, since their new ticket follows the release on the same
connection. So processes take turns, and tasks take turns within each process's turn.

Readers hold their grant together. They join as long as no other client waits. The grant goes back when the last reader
leaves.

When no task waits, the grant goes back immediately, unless it may *rest*: for ``linger`` seconds if no other process
waits; otherwise until the end of this turn of the loop, for a task that comes straight back. So a process with one busy
task gets as long a turn as one with many. (Not for writers: readers have no turn, each of them gets in once.)

Promises, per task. A grant is handed on only while it is certainly held (P1, by the local deadline). It is never handed
on after a task that overstayed its own time or left a command behind. A loss ends the parts of all tasks, and the
waiting tasks go on waiting with another ticket. A cancelled task leaves the line, or hands on the grant that it just
got (P5). When no task is left, the tickets are withdrawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING
from weakref import ref

from .._core.cancellation import undo_in
from .._core.clock import now
from ..errors import LimitMismatch, Unreachable
from ..errors._base import copy_error
from .acquisition import Acquisition, Request
from .grant import Grant
from .resource import Resource
from .shared_grant import Awaited, Holdings, ProcessGrant, Task, TaskGrant
from .waits import Waiter, Waits, timeout_error

if TYPE_CHECKING:
    from .._core.observers import Observation

# -- Requests of a cohort to the server ------------------------------------------------------------------------


class PendingGrant:
    """A request to the server for the next grant of its cohort."""

    _done = False

    def __init__(self, cohort: Cohort, request: Request, only: Awaited | None) -> None:
        self._cohort = cohort
        self.only = only  # the task that does not wait; None: the first task in the line
        self.wants = request
        self.limit: int = cohort.limit  # the limit at that time
        self.acquisition: Acquisition = Acquisition(cohort.resource, cohort.of_process(request), self)

    def done(self) -> bool:
        return self._done

    def set_result(self, lease: Grant | None, /) -> None:
        self._done = True
        self._cohort.opened(self, lease)
        del self.acquisition  # breaks a cycle: there is one for each uncontended grant

    def set_exception(self, error: Exception, /) -> None:
        self._done = True
        self._cohort.refused(self, error)

    def withdraw(self) -> None:
        """Undo the grant: no task needs it any more."""
        self._done = True
        self.acquisition.undo()


IN_ONE_TURN = 64
"""Immediate grants per turn of the event loop, before contention notices are processed."""


class Cohort(Holdings):
    """The tasks of this process that want the same of one name; see the top of this module.

    Invariants: some tasks in ``line`` are done (cancelled, or their time was up); ``_gone`` counts those whose end was
    noticed, less those that left the line before. The line is empty while a grant rests, except for the rest of a turn
    in which the grant was taken often. While a task waits there is a grant, or a pending one.
    """

    def __init__(self, resource: Resource, request: Request) -> None:
        super().__init__(resource, request)
        self._gone = 0
        self._replicated = request.replicated
        self.pending: list[PendingGrant] = []
        self._trying = 0  # those for tasks that do not wait, which are of no use to the line
        self._taken_now = 0
        self._watch: asyncio.TimerHandle | None = None  # of tasks that wait without a ticket
        self._latest: Request | None = None  # that was made one of the process

    # -- acquiring -------------------------------------------------------------------------------------

    def enter(
        self, request: Request, task: Task | None, within: float | None, *, again: bool = False
    ) -> Awaited | None:
        """Take a grant that rests, join the readers, or stand in the line; return None to ask in the next turn.

        Another cohort may be for the request by then, or the grant was taken often in this turn and the task does not
        wait. The second is no reason if it asks ``again``. If anything but the answer ends the await, the caller has to
        call `task_cancelled`. ``within``: the seconds until the task gives up; None: never.
        """
        if request.limit != self.limit:
            return None  # the limit of this cohort was changed
        answer: Awaited = asyncio.Future(loop=self.loop)  # as create_future(), without a call
        often = False
        if (self.resting or self.reads) and not self.waiting:
            often = self._taken_now >= IN_ONE_TURN and not again
            if often and not request.wait:
                return None
            if not often and (lease := self._take_now(request)) is not None:
                answer.set_result(lease)
                return answer
        if request.wait:
            if self._alone:
                self._check_waits(request, task)
            self.line.append((answer, request, now()))
            if self.grants:
                self._watch_line()
            if self._room > 0 and not (often and self.resting):  # otherwise the grant is handed on when this turn ends
                self._ask()
        elif self.waiting or self._room <= 0:
            answer.set_result(None)
        else:
            self._open(request, answer)
        if within is not None:
            timer = self.loop.call_later(within, self._time_out, answer, within)
            answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def _check_waits(self, request: Request, task: Task | None) -> None:
        """Raise WouldDeadlock if ``task``, the current one, would wait for the end of a body of its own."""
        for grant in self.grants:
            if not self.reads and grant.shares:  # one at most
                body = grant.shares[0].body
                if body is not None and body() is task:
                    self.resource.check_waits(request)

    def _watch_line(self) -> None:
        if self._watch is None:
            self._watch = self.loop.call_later(self.hub.options.poll_cap, self._look)
        if self.resource.waits is None:
            self.resource.waits = Waits(self.resource)

    def _look(self) -> None:
        """Ask the server whether the grant is still held: no task has a ticket whose answer would tell."""
        self._watch = None
        if self.waiting:
            if not self.pending and (grant := next(iter(self.grants), None)) is not None:
                grant.look()
            self._watch = self.loop.call_later(self.hub.options.poll_cap, self._look)

    def _take_now(self, request: Request) -> TaskGrant | None:
        """Take a grant that rests, or join the readers."""
        time = now()
        for grant in chain(self.resting, self.grants if self.reads else ()):
            if self._may_go_on(grant, time):
                if grant in self.resting:
                    del self.resting[grant]
                if not self._taken_now:
                    self.loop.call_soon(self._turn_ended)
                self._taken_now += 1
                return TaskGrant(self, grant, request)
        return None

    def _turn_ended(self) -> None:
        self._taken_now = 0
        if self.line:  # tasks that came after the last one that might have it in this turn
            time = now()
            for grant in list(self.grants if self.reads else self.resting):
                if self._may_go_on(grant, time) and self._hand_on(grant) and grant in self.resting:
                    del self.resting[grant]
            self._ask()

    def _ask(self) -> None:
        """Send a request for each task in the line, but no more than are of use."""
        while self._room > 0 and len(self.pending) - self._trying < self.waiting:
            first = next((request for future, request, _ in self.line if not future.done()), None)
            if first is None:
                return
            self._open(first, None)

    def _open(self, request: Request, only: Awaited | None) -> None:
        self._room -= 1
        self._trying += only is not None
        pending = PendingGrant(self, request, only)
        self.pending.append(pending)
        pending.acquisition.ask()

    def _trim(self) -> None:
        """Forget tasks that are gone if there are many, and withdraw tickets without a task."""
        if not self.waiting or self._gone > len(self.line) // 2 + 100:
            line = deque(waiter for waiter in self.line if not waiter[0].done())
            self._gone -= len(self.line) - len(line)
            self.line = line
        for_all = [one for one in self.pending if one.only is None]
        for pending in for_all[self.waiting :]:
            self._withdraw(pending)

    def of_process(self, request: Request) -> Request:
        """Return the request of the process for a task that wants this."""
        if request is not self._latest:
            self._latest = request
            self._of_process = Request(
                request.ttl_ms,
                auto_renew=True,
                wait=request.wait,
                weight=request.weight,
                limit=self.limit,
                option=request.option,
                refused=request.refused,
                shared=True,
                grant_type=ProcessGrant,
                label=request.label,
                replicated=request.replicated,
            )
        return self._of_process

    def _withdraw(self, pending: PendingGrant) -> None:
        self._ended(pending)
        pending.withdraw()

    def _ended(self, pending: PendingGrant) -> None:
        self.pending.remove(pending)
        self._room += 1
        self._trying -= pending.only is not None

    def task_cancelled(self, future: Awaited, request: Request) -> None:
        """Undo whatever was done for ``future``, which its task no longer awaits."""
        future.cancel()  # done already if the task was cancelled, but not if its coroutine was closed
        if not future.cancelled():  # it ended in the same turn of the loop
            if future.exception() is None and (lease := future.result()) is not None:
                lease.give_back()
            return
        if request.wait:
            self._gone += 1
            self._trim()
            self.resource.forget_if_idle()
            return
        for pending in [one for one in self.pending if one.only is future]:
            self._withdraw(pending)
            self._ask()

    def _time_out(self, future: Awaited, within: float) -> None:
        if future.done():
            return
        if self.pending and not self.grants:
            self.resource.look_last(partial(self._give_up, future, within))
        else:
            self._give_up(future, within)

    def _give_up(self, future: Awaited, within: float) -> None:
        if future.done():
            return
        if self.pending and not self.grants:
            future.set_exception(self.pending[0].acquisition.timeout_error(within))
        else:
            future.set_exception(timeout_error(self.resource, within, self._weight, self.limit))
        self._gone += 1
        self._trim()

    @property
    def waiting(self) -> int:
        """Number of tasks that wait here; a cancelled task counts until it has run."""
        return len(self.line) - max(self._gone, 0)

    @property
    def in_use(self) -> bool:
        """True if a task waits here, or there is a grant or a ticket."""
        return bool(self.waiting or self.grants or self.pending)

    # -- another limit ---------------------------------------------------------------------------------

    def resized(self, old: int, new: int) -> None:
        """Take note of another limit of the permits. When it is lower, what is released goes to the server.

        ``old`` is the limit that the server had. It differs from this cohort's if another process changed it before; it
        is ``new`` if an answer was lost.
        """
        if self.limit and self._moved(new):
            self._latest, before = None, self._places()
            self.limit = new
            self._room += self._places() - before
        if new <= old or self._room < 0:
            for grant in list(self.grants):
                self._limit_turn(grant)
                grant.budget = 0
        self._ask()

    def _moved(self, limit: int) -> bool:
        """Register this cohort under another limit; return False if another one is in use there."""
        key, cohorts = (self._weight, limit, self._replicated), self.resource.cohorts
        found = cohorts.get(key)
        if found is not None and found is not self and found.in_use:
            return False
        others = {known: other for known, other in cohorts.items() if other not in (self, found)}
        self.resource.cohorts = {**others, key: self}
        return True

    # -- answers of the server -------------------------------------------------------------------------

    def opened(self, pending: PendingGrant, lease: Grant | None) -> None:
        """Take the server's answer: a grant, or None, for a task that does not wait, when it is taken."""
        self._ended(pending)
        only = pending.only
        if lease is None:
            if only is not None and not only.done():
                only.set_result(None)
            self._ask()
            return
        assert isinstance(lease, ProcessGrant)
        grant = lease
        self._keep(grant, pending.acquisition.number)
        if only is not None and not only.done():
            only.set_result(TaskGrant(self, grant, pending.wants))
        elif not self._hand_on(grant):
            self.give_back(grant)
        if self.line:
            self._watch_line()
        if not grant.takes_room:
            self._ask()
        if pending.acquisition.contended:
            self.resource.on_contention()
        elif pending.acquisition.unheard:
            grant.look()

    def refused(self, pending: PendingGrant, error: Exception) -> None:
        """End the waits that ``error`` is about: the server did not answer, or refused."""
        self._ended(pending)
        if pending.only is not None:
            if not pending.only.done():
                pending.only.set_exception(error)
        elif pending.limit == self.limit or not isinstance(error, LimitMismatch):
            # (Else it was sent while the limit was being changed, and the tasks in the line may have come before.)
            # Tasks that came later than the ticket have more time to reach the server.
            latest = pending.acquisition.begun if isinstance(error, Unreachable) else inf
            for future, _, begun in self.line:
                if begun <= latest and not future.done():
                    future.set_exception(copy_error(error))
                    self._gone += 1
        self._trim()
        self._ask()
        self.resource.forget_if_idle()

    def waiters(self) -> Iterator[tuple[Waiter, float]]:
        """Iterate over the futures that the waiting tasks await, each with its beginning (local clock)."""
        return ((future, begun) for future, _, begun in self.line if not future.done())

    def refuse_waiter(self, waiter: Waiter, error: Exception) -> None:
        """End the wait of the task that awaits ``waiter``, if it waits here."""
        if any(waiter is future for future, _ in self.waiters()):
            waiter.set_exception(error)
            self._gone += 1
            self._trim()
            self.resource.forget_if_idle()

    def give_up(self, error: Exception) -> None:
        """End all waits with ``error``."""
        line = list(self.line)
        self.line.clear()
        for future, _, _ in line:
            if not future.done():
                future.set_exception(copy_error(error))
            else:
                self._gone -= 1

    def _hand_on(self, grant: ProcessGrant) -> bool:
        """Give the grant to the first task in the line, or to all (readers); return whether there was one."""
        taken, line = False, self.line
        while line:
            future, request, _ = line.popleft()
            if future.done():
                self._gone -= 1
            else:
                future.set_result(TaskGrant(self, grant, request))
                if not self.reads:
                    return True
                taken = True
        return taken


# -- All cohorts of one name, by what their requests ask for ------------------------------------------------


MANY = 16
"""Number of cohorts from which on unused ones are forgotten: there may be one for each weight that was asked for."""


def cohort_of(resource: Resource, request: Request) -> Cohort:
    """Return the cohort of tasks with equal requests for ``resource``."""
    key = (request.weight, request.limit, request.replicated)
    found = resource.cohorts.get(key)
    if found is None:
        known = resource.cohorts
        if len(known) >= MANY:
            known = {key: cohort for key, cohort in known.items() if cohort.in_use}
        found = Cohort(resource, request)
        resource.cohorts = {**known, key: found}
    return found


async def acquire_shared(
    cohort: Cohort, request: Request, task: Task | None, within: float | None, observation: Observation | None
) -> TaskGrant | None:
    """Acquire for ``task``, the current one; None when ``request.wait`` is False and it is taken."""
    again = False
    while (answer := cohort.enter(request, task, within, again=again)) is None:
        await asyncio.sleep(0)
        cohort.hub.check()
        # The name may have been forgotten meanwhile, and then made again, as another object.
        cohort, again = cohort_of(cohort.hub.resource(cohort.resource.keys, cohort.resource), request), True
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
