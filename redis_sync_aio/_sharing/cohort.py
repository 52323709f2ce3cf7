"""Tasks of this process that want the same: they stand behind few tickets at the server, and hand on what it granted.

The rule. What was granted to the process, a *base*, goes from task to task in the order in which they asked, without a
command, for as long as nobody else waits at the server. It says so, by a message (CONTENDED), as soon as somebody does;
from then on a base is handed on ``burst`` times at most and not after ``slice`` seconds, and then goes to the server,
which grants it to the first in its queue. Our tasks that still wait are behind all who waited there by then, as the
new ticket follows the release on the same connection. So processes take turns, and within a turn, tasks do.

Readers have their base together. They join as long as nobody else waits, and it goes back when the last one leaves.

Nobody to hand it on to. Then the base goes back at once, unless it may *rest*: for ``linger`` seconds if nobody else
waits; else until the end of this turn of the loop, for a task that comes straight back: a process with one busy task
gets as long a turn as one with many. (Not for writers: readers have no turn, each of them gets in once.)

Promises, per task. A base is handed on only while it is certainly held (P1, by the local deadline), and never after a
task that had it overstayed its own time, or left a command behind. A loss ends those who have it and is granted to
nobody; who waits goes on waiting, by another ticket. A task that is cancelled leaves the line, or hands on what it
was just handed (P5); when nobody is left, tickets are withdrawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._acquire.waits import Waits, timeout_error
from .._core.clock import now
from .._leases.grant import Grant
from ..errors import LimitMismatch, Unreachable, copy_error
from .holdings import Awaited, Holdings
from .pending_grant import PendingGrant
from .shared_grant import ProcessGrant, Task, TaskLease

IN_ONE_TURN = 64
"""A base is taken at once so often before the loop gets a chance to hear what others want."""


class Cohort(Holdings):
    """See the top of this module.

    Invariants: of those in ``line`` some are done (cancelled, or their time was up); ``_gone`` is how many of them we
    heard of, less those that left the line before that. It is empty while a base rests, but for the rest of a turn in
    which it was taken often. Whoever waits has a base, or an opening, before him.
    """

    def __init__(self, resource: Resource, request: Request, move: Callable[[Cohort, int, int], bool]) -> None:
        super().__init__(resource, request)
        self._move = move
        """Let this cohort be the one for a weight and another limit; return False if another one is."""
        self._gone = 0
        self._asked = 0  # openings so far
        self.openings: list[PendingGrant] = []
        self._trying = 0  # of them, for those who do not wait: they are of no use to the line
        self._taken_at_once = 0
        self._tries: list[tuple[Awaited, Request]] = []  # of those who do not wait: answered when this turn ends
        self._watch: asyncio.TimerHandle | None = None  # of tasks that wait without a ticket
        self._latest: Request | None = None  # that was made one of the process

    # -- acquiring -------------------------------------------------------------------------------------

    def enter(self, request: Request, task: Task | None) -> Awaited | None:
        """Take what rests, join the readers, or stand in the line; return None if another cohort is for it now.

        Whatever ends the await of the answer but the answer itself has to call `task_cancelled`.
        """
        if request.limit != self.limit:
            return None  # ours was changed
        answer: Awaited = asyncio.Future(loop=self.loop)  # what create_future() makes, a call later
        often = False
        if (self.resting or self._together) and not self.waiting:
            often = self._taken_at_once >= IN_ONE_TURN
            if often and not request.wait:
                self._tries.append((answer, request))
                return answer
            if not often and (lease := self._at_once(request)) is not None:
                answer.set_result(lease)
                return answer
        if request.wait:
            if self._alone:
                self._check_waits(request, task)
            self.line.append((answer, request, self._asked))
            if self.bases:
                self._watch_line()
            if self._room > 0 and not (often and self.resting):  # else it is handed on when this turn ends
                self._ask()
        elif self.waiting or self._room <= 0:
            answer.set_result(None)
        else:
            self._open(request, answer)
        if request.timeout is not None:
            timer = self.loop.call_later(request.timeout, self._time_out, answer, request.timeout)
            answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def _check_waits(self, request: Request, task: Task | None) -> None:
        """Raise WouldDeadlock if ``task``, the current one, would wait for the end of a body of its own."""
        for base in self.bases:
            if base.upgrader is not None:  # all who read by it wait for one of them
                self.resource.check_waits(request)
            elif not self._together and base.shares:  # one at most
                body = base.shares[0].body
                if body is not None and body() is task:
                    self.resource.check_waits(request)

    def _watch_line(self) -> None:
        if self._watch is None:
            self._watch = self.loop.call_later(self.hub.poll_cap, self._look)
        if self.resource.waits is None:
            self.resource.waits = Waits(self.resource)

    def _look(self) -> None:
        """Find out whether what is waited for is still held here: nobody has a ticket, which would look."""
        self._watch = None
        if self.waiting:
            if not self.openings and (base := next(iter(self.bases), None)) is not None:
                base.look()
            self._watch = self.loop.call_later(self.hub.poll_cap, self._look)

    def _at_once(self, request: Request) -> TaskLease | None:
        """Take a base that rests, or join the readers."""
        time = now()
        for base in chain(self.resting, self.bases if self._together else ()):
            if self._may_go_on(base, time):
                if base in self.resting:
                    del self.resting[base]
                if not self._taken_at_once:
                    self.loop.call_soon(self._turn_ended)
                self._taken_at_once += 1
                return TaskLease(self, base, request)
        return None

    def _turn_ended(self) -> None:
        self._taken_at_once = 0
        if self.line:  # those who came after the last one that might have it in this turn
            time = now()
            for base in list(self.bases if self._together else self.resting):
                if self._may_go_on(base, time) and self._hand_on(base) and base in self.resting:
                    del self.resting[base]
            self._ask()
        tries, self._tries = self._tries, []
        for answer, request in tries:
            if answer.done():
                continue
            lease = None if self.waiting else self._at_once(request)
            if lease is not None or self.waiting or self._room <= 0:
                answer.set_result(lease)
            else:
                self._open(request, answer)

    def _ask(self) -> None:
        """Have as many tickets out as there are tasks in the line, or as are of use."""
        while self._room > 0 and len(self.openings) - self._trying < self.waiting:
            first = next((request for future, request, _ in self.line if not future.done()), None)
            if first is None:
                return
            self._open(first, None)

    def _open(self, wanted: Request, only: Awaited | None) -> None:
        self._asked += 1
        self._room -= 1
        self._trying += only is not None
        opening = PendingGrant(self, wanted, only, self._asked)
        self.openings.append(opening)
        opening.ticket.ask()

    def _trim(self) -> None:
        """Forget those who are gone if there are many, and withdraw the tickets that nobody is left for."""
        if not self.waiting or self._gone > len(self.line) // 2 + 100:
            line = deque(waiter for waiter in self.line if not waiter[0].done())
            self._gone -= len(self.line) - len(line)
            self.line = line
        for_all = [opening for opening in self.openings if opening.only is None]
        for opening in for_all[self.waiting :]:
            self._withdraw(opening)

    def of_process(self, request: Request) -> Request:
        """Return what the process asks the server for, when a task wants this."""
        if request is not self._latest:
            self._latest = request
            self._of_process = Request(
                request.ttl_ms,
                auto_renew=True,
                wait=request.wait,
                weight=request.weight,
                limit=self.limit,
                whose_limit=request.whose_limit,
                refused=request.refused,
                shared=True,
                grant_type=ProcessGrant,
            )
        return self._of_process

    def _withdraw(self, opening: PendingGrant) -> None:
        self._ended(opening)
        opening.withdraw()

    def _ended(self, opening: PendingGrant) -> None:
        self.openings.remove(opening)
        self._room += 1
        self._trying -= opening.only is not None

    def task_cancelled(self, future: Awaited, request: Request) -> None:
        """The task does not await ``future`` any more."""
        future.cancel()  # that is done already if the task was cancelled, not if its coroutine was closed
        if not future.cancelled():  # it ended in the same turn of the loop
            if future.exception() is None and (lease := future.result()) is not None:
                lease.give_back()
            return
        if request.wait:
            self._gone += 1
            self._trim()
            self.resource.forget_if_idle()
            return
        for opening in [opening for opening in self.openings if opening.only is future]:
            self._withdraw(opening)
            self._ask()

    def _time_out(self, future: Awaited, within: float) -> None:
        if future.done():
            return
        if self.openings and not self.bases:
            self.resource.look_last(partial(self._give_up, future, within))
        else:
            self._give_up(future, within)

    def _give_up(self, future: Awaited, within: float) -> None:
        if future.done():
            return
        if self.openings and not self.bases:
            future.set_exception(self.openings[0].ticket.timeout_error(within))
        else:
            future.set_exception(timeout_error(self.resource, within, self._weight, self.limit))
        self._gone += 1
        self._trim()

    @property
    def waiting(self) -> int:
        """How many tasks wait here; more, while a task that is cancelled has not run since."""
        return len(self.line) - max(self._gone, 0)

    @property
    def in_use(self) -> bool:
        """Whether anybody waits here, or it has anything, or a ticket."""
        return bool(self.waiting or self.bases or self.openings)

    # -- another limit ---------------------------------------------------------------------------------

    def resized(self, old: int, new: int) -> None:
        """The limit of the permits was changed. When it is lower, what is released goes to the server.

        ``old`` is the server's: not ours if another process changed it before, and ``new`` if an answer was lost.
        """
        if self.limit and self._move(self, self._weight, new):
            self._latest, before = None, self._places()
            self.limit = new
            self._room += self._places() - before
        if new <= old or self._room < 0:
            for base in list(self.bases):
                self._wanted(base)
                base.budget = 0
        self._ask()

    # -- what becomes of tickets -----------------------------------------------------------------------

    def opened(self, opening: PendingGrant, lease: Grant | None) -> None:
        """The server granted it, or (None) said that it is taken to one who does not wait."""
        self._ended(opening)
        only = opening.only
        if lease is None:
            if only is not None and not only.done():
                only.set_result(None)
            self._ask()
            return
        assert isinstance(lease, ProcessGrant)
        base = lease
        self._keep(base, opening.ticket.number)
        if only is not None and not only.done():
            only.set_result(TaskLease(self, base, opening.wants))
        elif not self._hand_on(base):
            self.give_back(base)
        if self.line:
            self._watch_line()
        if not base.takes_room:
            self._ask()
        if opening.ticket.contended:
            self.resource.on_contention()
        elif opening.ticket.unheard:
            base.look()

    def refused(self, opening: PendingGrant, error: Exception) -> None:
        """There is no answer, or a bad one."""
        self._ended(opening)
        if opening.only is not None:
            if not opening.only.done():
                opening.only.set_exception(error)
        elif opening.limit == self.limit or not isinstance(error, LimitMismatch):
            # (Else it was sent while the limit was being changed, and who is in the line may have come before.)
            # Who came later than the ticket has more time to reach the server.
            late = opening.serial if isinstance(error, Unreachable) else self._asked + 1
            for future, _, after in self.line:
                if after < late and not future.done():
                    future.set_exception(copy_error(error))
                    self._gone += 1
        self._trim()
        self._ask()
        self.resource.forget_if_idle()

    def give_up(self, error: Exception) -> None:
        """End all who wait here."""
        tries, self._tries = self._tries, []
        for future, _ in tries:
            if not future.done():
                future.set_exception(copy_error(error))
        line, self.line = self.line, deque()
        for future, _, _ in line:
            if not future.done():
                future.set_exception(copy_error(error))
            else:
                self._gone -= 1

    def _hand_on(self, base: ProcessGrant) -> bool:
        """Give it to the first in the line, or to all of them (readers); return whether there was anybody."""
        taken, line = False, self.line
        while line:
            future, request, _ = line.popleft()
            if future.done():
                self._gone -= 1
            else:
                future.set_result(TaskLease(self, base, request))
                if not self._together:
                    return True
                taken = True
        return taken
