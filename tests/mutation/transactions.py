"""Mutants of transactions and guarded commits."""

from __future__ import annotations

from collections.abc import Mapping

from redis_sync_aio._client import checkout
from redis_sync_aio._client.checkout import CheckedOut
from redis_sync_aio._leases.lease import GrantGuard, Ownership
from redis_sync_aio._transactions import attempts
from redis_sync_aio._transactions.attempts import Attempts
from redis_sync_aio._transactions.exec_replies import CommitMarker
from redis_sync_aio._transactions.handle import GuardedTransaction, Transaction, TurnCheck
from redis_sync_aio._transactions.watch_session import WatchSession

from ..support.mutants import Mutant

MUTANTS: Mapping[str, Mutant] = {
    # WATCH and EXEC
    "nothing is watched": Mutant(
        WatchSession, "send", '("WATCH", *self._to_watch)', '("PING",)', by="test_a_conflict_runs_the_whole_body_again"
    ),
    "the guard is not watched the second time": Mutant(
        WatchSession,
        "begin_again",
        "[*self.keys, *self._also_watched]",
        '[b"else"]',
        by="test_a_commit_beside_a_busy_semaphore_has_an_end",
    ),
    "a conflict is taken for done": Mutant(
        WatchSession,
        "execute",
        "is None:\n        return None",
        "is None:\n        return ()",
        by="test_a_conflict_runs_the_whole_body_again",
    ),
    "what was not sent is not known": Mutant(
        WatchSession,
        "execute",
        "not connection.written or ",
        "",
        by="test_exec_is_not_sent_on_a_connection_whose_end_is_known",
    ),
    "nobody asks whether MULTI is allowed": Mutant(
        WatchSession,
        "send",
        "if connection.executes",
        "if True",
        by="test_a_user_without_the_right_to_multi_or_exec_writes_nothing",
    ),
    "it asks each time": Mutant(
        CheckedOut, "check_executes", "_proven.add(writer)", by="test_it_takes_two_round_trips"
    ),
    "a refused EXEC leaves MULTI open": Mutant(
        WatchSession,
        "execute",
        "isinstance(executed, redis.exceptions.ExecAbortError)",
        "True",
        by="test_exec_refused_does_nothing_and_leaves_no_multi_open",
    ),
    # again, or not
    "a conflict is not tried again": Mutant(
        Attempts,
        "_commit",
        "if not self._again(self._conflict_delays, None):",
        "if True:",
        by="test_a_conflict_runs_the_whole_body_again",
    ),
    "one attempt more": Mutant(
        Attempts, "_again", "self._attempts >=", "self._attempts >", by="test_it_gives_up_after_so_many_attempts"
    ),
    "the deadline is ignored": Mutant(
        Attempts, "_again", "late or self._attempts", "self._attempts", by="test_it_gives_up_when_its_time_is_over"
    ),
    "an error before EXEC is final": Mutant(
        Attempts,
        "_pass",
        "is_transient(error) and",
        "False and",
        by="test_what_is_lost_while_it_finds_out_is_tried_again",
    ),
    "what is not known is repeated": Mutant(
        Attempts,
        "_unanswered",
        "elif executed is None and not self._terms.idempotent:",
        "elif False:",
        by="test_the_limit_of_a_coordinator_is_an_argument",
    ),
    "the idempotent is not repeated": Mutant(
        Attempts,
        "_unanswered",
        "and not self._terms.idempotent",
        "",
        by="test_an_error_of_ours_does_not_hide_an_earlier_commit",
    ),
    "the error of the body is swallowed": Mutant(
        Attempts, "leave", "return False  # P7", "return True  # P7", by="test_the_bodys_own_error_comes_out_bare"
    ),
    "the body's Unreachable is taken for ours": Mutant(
        attempts,
        "_connection_error_in",
        "if error is reason:\n        return reason",
        "if error:\n        return error",
        by="test_an_error_of_the_bodys_own_comes_with_a_note_of_it",
    ),
    "an error in a group is the body's": Mutant(
        attempts,
        "_connection_error_in",
        "return reason if others",
        "return None if others",
        by="test_an_error_in_a_group_is_tried_again_as_a_bare_one_is",
    ),
    "an earlier EXEC is forgotten": Mutant(
        Attempts,
        "_give_up",
        "if not self._perhaps or",
        "if True or",
        by="test_an_error_of_ours_does_not_hide_an_earlier_commit",
    ),
    "an earlier EXEC is forgotten in a note": Mutant(
        Attempts,
        "_body_failed",
        "if self._perhaps:",
        "if False:",
        by="test_an_error_of_the_bodys_own_comes_with_a_note_of_it",
    ),
    "what is caught inside the loop ends it": Mutant(
        Attempts,
        "__anext__",
        "if self._left is None:",
        "if True:",
        by="test_a_body_error_that_is_caught_inside_the_loop_is_not_the_end_of_it",
    ),
    # the marker
    "the marker is not watched": Mutant(
        WatchSession, "__init__", "(marker.key,)", "()", by="test_the_marker_alone_makes_a_late_exec_void"
    ),
    "the marker is not written": Mutant(
        WatchSession, "__init__", "(marker.done,)", "()", by="test_a_late_exec_that_overtakes_the_question_is_found"
    ),
    "the marker is only looked at": Mutant(
        CommitMarker,
        "_ask",
        'self._set(VOID, "NX")',
        '("PING",)',
        by="test_an_exec_that_never_came_is_found_although_the_question_gets_lost_too",
    ),
    "void goes over done": Mutant(
        CommitMarker,
        "_ask",
        'self._set(VOID, "NX")',
        "self._set(VOID)",
        by="test_a_late_exec_that_overtakes_the_question_is_found",
    ),
    "a marker is trusted forever": Mutant(
        CommitMarker,
        "find_out",
        "False if now() < sent + MARKER_TTL else None",
        "False",
        by="test_a_marker_is_not_trusted_for_ever",
    ),
    # the connection
    "it goes back watching": Mutant(
        CheckedOut,
        "_give_back",
        "if self.watching or not self.in_step:",
        "if not self.in_step:",
        by="test_cancelled_between_two_commands",
    ),
    "it goes back to a server that refuses everything": Mutant(
        WatchSession,
        "refused",
        "self._connection.in_step = False",
        by="test_another_connection_may_lead_to_another_server",
    ),
    "it is not given back after an error": Mutant(
        Transaction,
        "_end",
        "await self._session.give_back(drop)",
        by="test_the_bodys_own_error_comes_out_bare test_misuse_is_refused_and_writes_nothing",
    ),
    "it is lost when nobody waits for it any more": Mutant(
        checkout,
        "_give_back_opened",
        "_start_giving_back(CheckedOut(client, connecting.result()), drop=False)",
        by="test_cancelled_after_so_many_turns_of_the_loop",
    ),
    # turns
    "nobody looks whose turn it is": Mutant(
        TurnCheck,
        "commands",
        "if self._turn.held",
        "if True",
        by="test_a_transaction_that_finds_a_turn_taken_takes_its_own",
    ),
    "somebody else's turn does not matter": Mutant(
        TurnCheck, "verify", "if any(replies)", "if False", by="test_waiting_for_the_turn_ends_with_the_deadline"
    ),
    "it keeps its connection while it waits": Mutant(
        WatchSession, "_verified", "await self.begin_again()", by="test_cancelled_while_it_waits_for_its_turn"
    ),
    "the turn is taken one conflict later": Mutant(
        Attempts,
        "_before_next",
        "self._conflicts >= after",
        "self._conflicts > after",
        by="test_after_so_many_conflicts_it_has_the_turn_until_it_commits",
    ),
    "the turn is not given back": Mutant(
        Attempts,
        "_finish",
        "self._turn.give_back()",
        by="test_after_so_many_conflicts_it_has_the_turn_until_it_commits",
    ),
    "the one that has the turn does not wait": Mutant(
        Attempts,
        "_before_next",
        "elif self._delay:",
        "elif self._delay and not (turn and turn.held):",
        by="test_a_turn_that_does_not_help_does_not_end_the_back_off",
    ),
    "waiting for the turn has no end": Mutant(
        Attempts,
        "_take_turn",
        "None if ends is None else max(0.0, self._begun + ends - now())",
        "None",
        by="test_waiting_for_the_turn_ends_with_the_deadline",
    ),
    # the guard
    "the token is not compared": Mutant(
        GrantGuard, "verify", "if reason is not None:", "if False:", by="test_nothing_is_written_when_it_is_lost_before"
    ),
    "any token will do": Mutant(
        Ownership,
        "loss",
        "holder == self.token",
        "holder is not None",
        by="test_another_holder_is_told_apart_from_nobody",
    ),
    "the lock is not watched": Mutant(
        Ownership,
        "watched",
        "self.keys.all[:1]",
        "self.keys.all[1:2]",
        by="test_nothing_is_written_when_it_is_lost_between_check_and_exec",
    ),
    "a spent permit guards": Mutant(
        Ownership, "loss", "else found > 0", "else True", by="test_the_tombstone_of_a_permit_guards_nothing"
    ),
    "a renewal is a conflict": Mutant(
        GuardedTransaction,
        "_commit_while_held",
        "if self._named() or now() + delay",
        "if True or now() + delay",
        by="test_a_renewal_between_check_and_exec_is_no_loss",
    ),
    "an unanswered guarded EXEC is repeated": Mutant(
        GuardedTransaction,
        "_commit_while_held",
        "raise OutcomeUnknown(lease=self._guard.name, attempts=1, keys=keys) from outcome.cause",
        "outcome = None",
        by="test_a_connection_lost_before_exec_is_replaced_while_the_lease_holds",
    ),
}
