"""Mutants of local sharing: each takes one decision out of it, and a check or a schedule has to notice.

As `test_core_mutants.py`; without pushes nothing is shared, so there is one way only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from redis_sync_aio._leases.cohort import Cohort
from redis_sync_aio._leases.hub import LinkEvents
from redis_sync_aio._leases.manager import GrantManager
from redis_sync_aio._leases.shared_grant import Holdings, ProcessGrant, TaskGrant
from redis_sync_aio._primitives.base import Primitive
from redis_sync_aio.embedded import EmbeddedServer

from ..support.core_checks import of
from ..support.mutants import Found, Mutant, all_pass, failing, is_caught
from ..support.sharing_checks import CHECKS, check_schedules

MUTANTS: Mapping[str, Mutant] = {
    # P1 exclusion
    "handed on after the deadline": Mutant(Holdings, "_may_go_on", "time >= grant.deadline", "False"),
    "an ended lease hands on": Mutant(Holdings, "passed_on", "if time >= lease.deadline:", "if False:"),
    "who overstays hands it on": Mutant(Holdings, "forget", "self.give_back(grant)", "self._hand_on(grant)"),
    "a loss hands on": Mutant(Holdings, "lost", "self._ask()", "self._hand_on(grant)"),
    "a loss is not told": Mutant(Holdings, "lost", 'share.lose(grant.reason or "expired")'),
    "handed to two": Mutant(Cohort, "_hand_on", "if not self.reads:", "if False:"),
    "handed on and kept resting": Mutant(Cohort, "_take_now", "del self.resting[grant]"),
    "no end of its own": Mutant(TaskGrant, "_limit", "self.end_in(request.ttl_ms / 1000)"),
    "no max_hold": Mutant(TaskGrant, "_limit", "self.end_in(request.max_hold)"),
    # P2 turns
    "the budget is never counted": Mutant(TaskGrant, "__init__", "grant.budget -= 1"),
    "the budget does not count": Mutant(Holdings, "_may_go_on", "grant.budget > 0", "True"),
    "the slice does not count": Mutant(Holdings, "_may_go_on", "time < grant.yield_at", "True"),
    "nobody is told": Mutant(
        ProcessGrant, "on_contention", "(resource.hub.resources.get(self.keys.id) or resource).on_contention()"
    ),
    "the word does not arrive": Mutant(LinkEvents, "_dispatch", "listener.on_contention()"),
    "each word begins again": Mutant(Holdings, "_limit_turn", "if grant.contended:", "if False:"),
    "nothing is asked for the waiters": Mutant(Holdings, "give_back", "self._ask()"),
    "its room is counted twice": Mutant(Holdings, "_leave_room", "if grant.takes_room:", "if True:"),
    "what is left behind is handed on": Mutant(Holdings, "part_with", "grant.sound = False"),
    "who commits hands it on": Mutant(Holdings, "passed_on", "self.part_with(grant)"),
    "who takes it often goes on": Mutant(Cohort, "enter", "self._taken_now >= IN_ONE_TURN", "False"),
    "who was put off gets nothing": Mutant(Cohort, "_turn_ended", "self._hand_on(grant)", "False"),
    "who asks again is put off again": Mutant(Cohort, "enter", " and not again", ""),
    "last come, first served": Mutant(Cohort, "_hand_on", "line.popleft()", "line.pop()"),
    # P3 wake-up
    "a renewal tells nothing": Mutant(ProcessGrant, "renewed", "self.on_contention()"),
    "who asked again does not look": Mutant(Cohort, "opened", "grant.look()"),
    "a loss asks for nothing": Mutant(Holdings, "lost", "self._ask()"),
    "it rests although others wait": Mutant(Holdings, "_rest", "if grant.contended:", "if False:"),
    "it rests forever": Mutant(Holdings, "_end_of_rest", "self.give_back(grant)"),
    "its rest does not begin again": Mutant(Holdings, "_rest", "grant.rests_since = time"),
    # P5 cancellation
    "who is done counts as living": Mutant(Cohort, "_hand_on", "if future.done():", "if False:"),
    "who is cancelled keeps what he was handed": Mutant(Cohort, "task_cancelled", "lease.give_back()", "pass"),
    "who is cancelled still counts": Mutant(
        Cohort, "task_cancelled", "self._gone += 1\n        self._trim()", "self._trim()"
    ),
    "who is cancelled on the short way still counts": Mutant(
        Primitive, "_acquired", "undo_in(cohort.loop, partial(cohort.task_cancelled, answer, request))"
    ),
    "tickets stay when all have gone": Mutant(Cohort, "_trim", "self._withdraw(pending)"),
    "whose time is up still counts": Mutant(Cohort, "_give_up", "self._gone += 1"),
    "what is not needed is kept": Mutant(Cohort, "opened", "self.give_back(grant)"),
    # P8 fencing
    "one fence for all": Mutant(TaskGrant, "__init__", "grant.next_fence = fence + grant.step"),
    "beyond the range": Mutant(Holdings, "_may_go_on", "grant.next_fence > grant.last_fence", "False"),
    # P12 the end
    "what rests is renewed forever": Mutant(GrantManager, "take_away", "self.release(lease)"),
}


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def run(private: EmbeddedServer) -> Found:
    return failing(private, [(name, of(check, link=True)) for name, check in CHECKS.items()], check_schedules)


@pytest.mark.ci
def test_sharing_passes_every_check(private: EmbeddedServer) -> None:
    all_pass(run(private))
    assert len(CHECKS) >= 12


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_is_caught(private: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    mutant.apply(monkeypatch)
    is_caught(run(private))
