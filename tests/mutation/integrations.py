"""Mutants of what stands on locks: Redlock, jobs, redis-py's lock, web and metrics, commands, inspection, losses."""

from __future__ import annotations

from collections.abc import Mapping

from redis_sync_aio import compat, jobs
from redis_sync_aio._inspection import reading, views
from redis_sync_aio._primitives import majority, quorum
from redis_sync_aio.cli import _session
from redis_sync_aio.contrib import _series, _web, prometheus
from redis_sync_aio.testing import _losses
from redis_sync_aio.testing.faults import Rule

from ..support.mutants import Mutant

MUTANTS: Mapping[str, Mutant] = {
    # Redlock
    "one server may count twice": Mutant(
        majority, "check_independent", "if first != number:", "if False:", by="test_several_clients_of_one_server"
    ),
    "one server is a majority": Mutant(
        majority.Majority, "__init__", "majority(len(locks))", "1", by="test_e9_no_majority_answers"
    ),
    "clocks may be far apart": Mutant(
        majority,
        "majority_fence",
        "first - last <= APART_US",
        "True",
        by="test_p8_a_server_whose_clock_is_an_hour_ahead",
    ),
    "clocks that are apart are not named": Mutant(
        majority,
        "why_no_fence",
        "if len(granted) < sum(vote.known for vote in votes):",
        "if True:",
        by="test_p8_fences_rise_when_the_one_that_is_ahead_is_all_that_remembers",
    ),
    "a server whose clock is ahead is not reported": Mutant(
        majority,
        "report_ahead",
        "elif not hub.ahead_reported:",
        "elif False:",
        by="test_p8_a_server_whose_clock_is_an_hour_ahead",
    ),
    "a minority that answers is enough": Mutant(
        majority.Majority, "_ask_all", "if len(answered) < self.quorum:", "if False:", by="test_e9_no_majority_answers"
    ),
    "a waiter at a server is passed": Mutant(
        majority.Majority,
        "_ask_all",
        "if found is not None and found.waiting > gate.waits:",
        "if False:",
        by="test_p2_try_acquire_does_not_pass_a_waiter",
    ),
    "a fence that fewer than a majority granted counts": Mutant(
        majority, "agreed_fence", "fences.count(fence) >= quorum", "True", by="test_a_random_schedule"
    ),
    "fences that differ are not raised": Mutant(
        quorum,
        "raise_fence",
        "if lease.fence < fence:",
        "if False:",
        by="test_a_random_schedule test_p4_a_fault_at_one_server",
    ),
    "a late grant with a lower fence joins": Mutant(
        quorum.QuorumGroup,
        "answered",
        "lease.fence < self.fence",
        "False",
        by="test_p8_servers_that_join_stand_in_for_those_that_forget",
    ),
    "a hand-over waits for the next look": Mutant(
        quorum.Attempt, "answered", "self._decided()", "False", by="test_p1_p3_p8_contended_hand_overs"
    ),
    "a transient refusal is final": Mutant(
        majority.Majority,
        "acquire",
        "not is_transient(error) or now() + delay >= min(unanswered_until, ends)",
        "True",
        by="test_refused_by_a_minority test_refused_by_a_majority test_a_waiter_at_a_server_that_fails_goes_to_another",
    ),
    # jobs
    "a job that is done runs again": Mutant(
        jobs._Once,
        "_state",
        'return None if said is None else "done"',
        "return None",
        by="test_a_slot_that_is_done",
    ),
    "a job that failed is running": Mutant(
        jobs._Once, "_state", "if await self._lock.locked():", "if True:", by="test_a_slot_whose_run_raised"
    ),
    "a job is not marked as done": Mutant(
        jobs._Once,
        "_body",
        "await mark.write(lease, {DONE: True}, now() - begun if skips else 0.0)",
        by="test_one_of_several_enters_and_the_mark_outlasts_the_lock",
    ),
    "another request with the same name gets its result": Mutant(
        jobs._JobCall, "_is_kept", "said[FINGERPRINT] != self._fingerprint", "False", by="primitives/test_jobs.py"
    ),
    # redis-py's lock
    "a lock that is not owned is released": Mutant(
        compat.Lock,
        "release",
        "if not await self._give_back",
        "if False and await self._give_back",
        by="test_each_acquire_has_a_token_of_its_own_until_the_release",
    ),
    "a released lock keeps its token": Mutant(
        compat.Lock, "_give_back", "self.local.token = None", by="conformance/test_compat.py"
    ),
    "a chosen token is asked for once": Mutant(
        compat.Lock, "_poll", "while (left := ends - now()) > 0:", "while False:", by="conformance/test_compat.py"
    ),
    "a lock without a timeout is extended": Mutant(
        compat.Lock,
        "_token_to",
        "if not self.timeout:",
        "if False:",
        by="test_extending_an_unlocked_or_endless_lock_is_refused_at_the_call",
    ),
    # web frameworks and metrics
    "a full queue is busy": Mutant(
        _web.RequestLease,
        "__aenter__",
        "FULL if isinstance(error, QueueFull) else self.status",
        "self.status",
        by="test_busy_is_423_a_full_queue_429_and_an_inner_lock_503",
    ),
    "the first of two holds of a request releases": Mutant(
        _web.RequestLease,
        "__aexit__",
        "if not self.holds:",
        "if True:",
        by="test_two_holds_of_a_name_in_a_request_are_one_lease",
    ),
    "a request waits for itself": Mutant(
        _web.Holding, "of", "held.get(key) or ", "", by="test_two_holds_of_a_name_in_a_request_are_one_lease"
    ),
    "a lost lease is not counted": Mutant(
        _series.Meter,
        "__call__",
        'self._measure(LOST, 1, {**base, "lost.reason": event.reason})',
        by="test_waits_holds_and_losses_are_scraped_by_pattern",
    ),
    "a port is part of the address": Mutant(
        _series,
        "server_attributes",
        "if colon and",
        "if not colon and",
        by="test_late_renewals_and_reconnections_are_measured",
    ),
    "a second collect counts twice": Mutant(
        prometheus, "collect", "earlier.close()", by="test_collecting_twice_replaces_and_counts_once"
    ),
    # commands
    "a refused login is a server out of reach": Mutant(
        _session, "explained", '{_LOG_IN}", DENIED)', '{_LOG_IN}", UNREACHABLE)', by="test_a_command_ends_with_its_code"
    ),
    "a failure ends well": Mutant(
        _session, "_execute", "code = failure.code", "code = 0", by="test_a_command_ends_with_its_code"
    ),
    # inspection
    "a pattern may have no end": Mutant(
        views,
        "check",
        "finished is None or finished.end() == len(pattern)",
        "True",
        by="test_a_pattern_without_an_end_is_refused test_only_names_that_match_are_shown_and_not_more_than_asked_for",
    ),
    "a pattern may be a name": Mutant(
        views,
        "exact",
        "None if None in literals else ",
        "",
        by="test_only_names_that_match_are_shown_and_not_more_than_asked_for",
    ),
    "a request of a writer weighs all": Mutant(
        reading,
        "_waiter",
        "1 if permits == WRITER_WEIGHT else ticket.weight",
        "ticket.weight",
        by="test_each_kind_is_told_by_its_keys",
    ),
    "what is released meanwhile is shown": Mutant(
        reading,
        "look",
        "if reading.stale and more < MANY:",
        "if False:",
        by="inspection/test_statistics.py inspection/test_problems.py inspection/test_interrupted.py",
    ),
    "a value of another program is ours": Mutant(
        reading.LockReading,
        "_holder_view",
        "not ours and self._readable(self._fence_key, FENCE)",
        "False",
        by="test_a_value_of_another_program_without_a_ttl",
    ),
    # losses and faults on demand
    "a frozen renewal is sent": Mutant(
        _losses._Frozen,
        "__enter__",
        "renewals.renew_if_due = put_off",
        by="test_frozen_renewals_let_leases_end_with_their_ttl",
    ),
    "renewals stay frozen": Mutant(
        _losses._Frozen,
        "__exit__",
        "renewals.renew_if_due(grant)",
        by="test_frozen_renewals_let_leases_end_with_their_ttl",
    ),
    "a released lease is lost": Mutant(_losses, "lose", "grant.check()", by="test_what_cannot_be_lost_is_refused"),
    "its holders do not learn of a theft": Mutant(
        _losses,
        "steal",
        'await _notice(grant, "taken")',
        by="test_a_stolen_lock_is_lost_and_can_be_given_to_the_next_waiter",
    ),
    "a rule acts from the first match": Mutant(
        Rule, "takes", "self.hits <= self._skip or ", "", by="testing/ transactions/test_transaction_edges.py"
    ),
    "a rule acts on each match": Mutant(
        Rule,
        "takes",
        "(self._times is not None and self.acted >= self._times)",
        "False",
        by="test_an_exec_that_never_came_is_found_although_the_question_gets_lost_too",
    ),
}
