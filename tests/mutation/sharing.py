"""Mutants of local sharing."""

from __future__ import annotations

from collections.abc import Mapping

from redis_sync_aio._leases.cohort import Cohort
from redis_sync_aio._leases.hub import LinkEvents
from redis_sync_aio._leases.manager import GrantManager
from redis_sync_aio._leases.shared_grant import Holdings, ProcessGrant, TaskGrant
from redis_sync_aio._primitives.base import Primitive

from ..support.mutants import Mutant

MUTANTS: Mapping[str, Mutant] = {
    # P1 exclusion
    "handed on after the deadline": Mutant(
        Holdings, "_may_go_on", "time >= grant.deadline", "False", by="test_p1_a_process_that_was_stopped"
    ),
    "an ended lease hands on": Mutant(
        Holdings, "passed_on", "if time >= lease.deadline:", "if False:", by="test_p1_a_process_that_was_stopped"
    ),
    "who overstays hands it on": Mutant(
        Holdings, "forget", "self.give_back(grant)", "self._hand_on(grant)", by="test_p6_a_task_that_overstays"
    ),
    "a loss hands on": Mutant(
        Holdings, "lost", "self._ask()", "self._hand_on(grant)", by="test_p1_p6_the_base_is_lost"
    ),
    "a loss is not told": Mutant(
        Holdings, "lost", 'share.lose(grant.reason or "expired")', by="test_p1_p6_the_base_is_lost"
    ),
    "handed to two": Mutant(Cohort, "_hand_on", "if not self.reads:", "if False:", by="test_p2_p5_one_of_many_leaves"),
    "handed on and kept resting": Mutant(
        Cohort, "_take_now", "del self.resting[grant]", by="test_p1_what_rests_is_taken_by_one_task"
    ),
    "no end of its own": Mutant(
        TaskGrant, "_limit", "self.end_in(request.ttl_ms / 1000)", by="test_p6_a_task_that_overstays"
    ),
    "no max_hold": Mutant(TaskGrant, "_limit", "self.end_in(request.max_hold)", by="test_p6_a_task_that_overstays"),
    # P2 turns
    "the budget is never counted": Mutant(
        TaskGrant, "__init__", "grant.budget -= 1", by="test_p1_p2_told_and_released"
    ),
    "the budget does not count": Mutant(
        Holdings, "_may_go_on", "grant.budget > 0", "True", by="test_p1_p2_told_and_released"
    ),
    "the slice does not count": Mutant(
        Holdings, "_may_go_on", "time < grant.yield_at", "True", by="test_p2_not_after_slice"
    ),
    "nobody is told": Mutant(
        ProcessGrant,
        "on_contention",
        "(resource.hub.resources.get(self.keys.id) or resource).on_contention()",
        by="test_p2_not_after_slice",
    ),
    "the word does not arrive": Mutant(
        LinkEvents, "_dispatch", "listener.on_contention()", by="test_p1_p2_told_and_released"
    ),
    "each word begins again": Mutant(
        Holdings,
        "_limit_turn",
        "if grant.contended:",
        "if False:",
        by="test_p2_another_word_does_not_begin_another_burst",
    ),
    "nothing is asked for the waiters": Mutant(Holdings, "give_back", "self._ask()", by="test_p2_not_after_slice"),
    "its room is counted twice": Mutant(
        Holdings, "_leave_room", "if grant.takes_room:", "if True:", by="test_p2_what_is_left_behind_when_it_has_ended"
    ),
    "what is left behind is handed on": Mutant(
        Holdings, "part_with", "grant.sound = False", by="test_a_late_command_does_not_pass_for_the_next_task"
    ),
    "who commits hands it on": Mutant(
        Holdings,
        "passed_on",
        "self.part_with(grant)",
        by="test_a_late_command_does_not_pass_for_the_next_task",
    ),
    "who takes it often goes on": Mutant(
        Cohort,
        "enter",
        "self._taken_now >= IN_ONE_TURN",
        "False",
        by="test_p2_sections_that_do_not_suspend_keep_nobody_out",
    ),
    "who was put off gets nothing": Mutant(
        Cohort,
        "_turn_ended",
        "self._hand_on(grant)",
        "False",
        by="test_p2_sections_that_do_not_suspend_keep_nobody_out",
    ),
    "who asks again is put off again": Mutant(
        Cohort, "enter", " and not again", "", by="test_p2_a_task_that_tries_again_gets_in_between_busy_turns"
    ),
    "last come, first served": Mutant(
        Cohort, "_hand_on", "line.popleft()", "line.pop()", by="test_p2_p5_one_of_many_leaves"
    ),
    # P3 wake-up
    "a renewal tells nothing": Mutant(
        ProcessGrant, "renewed", "self.on_contention()", by="test_p3_the_word_is_lost_and_a_renewal_says_it"
    ),
    "who asked again does not look": Mutant(
        Cohort, "opened", "grant.look()", by="test_p3_the_word_is_lost_with_the_answer_to_the_request"
    ),
    "a loss asks for nothing": Mutant(Holdings, "lost", "self._ask()", by="test_p1_p6_the_base_is_lost"),
    "it rests although others wait": Mutant(
        Holdings, "_rest", "if grant.contended:", "if False:", by="test_p2_nothing_rests_while_others_wait"
    ),
    "it rests forever": Mutant(
        Holdings, "_end_of_rest", "self.give_back(grant)", by="test_p3_what_rests_goes_after_linger"
    ),
    "its rest does not begin again": Mutant(
        Holdings, "_rest", "grant.rests_since = time", by="test_p2_linger_begins_again_with_each_release"
    ),
    # P5 cancellation
    "who is done counts as living": Mutant(
        Cohort,
        "_hand_on",
        "if future.done():",
        "if False:",
        by="test_p5_all_waiters_are_cancelled_while_it_is_handed_on",
    ),
    "who is cancelled keeps what he was handed": Mutant(
        Cohort, "task_cancelled", "lease.give_back()", "pass", by="test_p5_cancelled_while_it_is_handed_on"
    ),
    "who is cancelled still counts": Mutant(
        Cohort,
        "task_cancelled",
        "self._gone += 1\n        self._trim()",
        "self._trim()",
        by="test_p5_the_last_one_withdraws_the_ticket",
    ),
    "who is cancelled on the short way still counts": Mutant(
        Primitive,
        "_acquired",
        "undo_in(cohort.loop, partial(cohort.task_cancelled, answer, request))",
        by="test_p2_p5_one_of_many_leaves",
    ),
    "tickets stay when all have gone": Mutant(
        Cohort, "_trim", "self._withdraw(pending)", by="test_p5_the_last_one_withdraws_the_ticket"
    ),
    "whose time is up still counts": Mutant(
        Cohort, "_give_up", "self._gone += 1", by="test_p5_the_last_one_withdraws_the_ticket"
    ),
    "what is not needed is kept": Mutant(
        Cohort, "opened", "self.give_back(grant)", by="test_p5_a_grant_for_a_task_that_just_left_goes_back"
    ),
    # P8 fencing
    "one fence for all": Mutant(
        TaskGrant,
        "__init__",
        "grant.next_fence = fence + grant.step",
        by="test_p8_what_one_has_at_a_time_has_rising_fences",
    ),
    "beyond the range": Mutant(
        Holdings, "_may_go_on", "grant.next_fence > grant.last_fence", "False", by="test_p8_fences_that_are_used_up"
    ),
    # P12 the end
    "what rests is renewed forever": Mutant(
        GrantManager, "take_away", "self.release(lease)", by="test_p12_what_rests_when_all_is_closed"
    ),
}
