"""Mutants of the Python core: requests, leases, renewals, identities, the queue of calls."""

from __future__ import annotations

from collections.abc import Mapping

from redis_sync_aio._leases import manager as releases
from redis_sync_aio._leases.acquisition import Acquisition, IdentityAcquisition
from redis_sync_aio._leases.hold import Acquiring, CancelOnLoss
from redis_sync_aio._leases.hub import LinkEvents
from redis_sync_aio._leases.identities import IdentityRequests
from redis_sync_aio._leases.manager import GrantManager
from redis_sync_aio._leases.renewals import Renewals
from redis_sync_aio._leases.waits import Healing
from redis_sync_aio._transport.link import CallQueue

from ..support.mutants import Mutant

MUTANTS: Mapping[str, Mutant] = {
    # P3 wake-up
    "waiters are not re-checked": Mutant(
        LinkEvents, "_recheck", "acquisition.recheck()", by="test_rechecks_come_first"
    ),
    "nobody looks again": Mutant(
        Healing, "_look", "acquisition.ask()", by="test_joining_without_a_ttl_what_has_an_end"
    ),
    "a look only when the lease should have ended": Mutant(
        Healing, "queued", "min(left + EARLY, delay)", "left + EARLY", by="test_lost_push_is_healed"
    ),
    "the claim is the whole ttl": Mutant(
        Acquisition,
        "_name_request",
        "min(request.ttl_ms, hub.claim_ms)",
        "request.ttl_ms",
        by="test_renewals_keep_a_handed_over_lease_alive",
    ),
    "the claim is all that a lease without renewals gets": Mutant(
        Acquisition,
        "_name_request",
        "if request.auto_renew else request.ttl_ms",
        "",
        by="test_p3_the_end_of_a_lease_that_was_handed_over_before",
    ),
    "a claim is renewed after a third, as a ttl": Mutant(
        Acquisition,
        "_granted",
        "resource.hub.manager.renewals.renew_claim_soon(lease)",
        by="test_a_claim_whose_renewal_is_refused",
    ),
    # P4 replay
    "GONE is lost, whatever happened before": Mutant(
        releases,
        "release_error",
        "((call.ambiguous or lease.release_uncertain) and call.sent < lease.deadline)",
        "False",
        by="test_no_answer_to_the_script_itself",
    ),
    "a lost connection is no doubt": Mutant(
        CallQueue, "put_back", "call.ambiguous |= perhaps", by="test_p4_a_release_by_identity_without_an_answer"
    ),
    "what was not answered is not sent again": Mutant(
        CallQueue, "put_back", "self.unsent.extendleft(reversed(resend))", by="test_p4_granted_and_the_answer_lost"
    ),
    "a force_release is repeated": Mutant(
        CallQueue, "put_back", "if call.at_most_once and perhaps:", "if False:", by="test_force_release_is_sent_once"
    ),
    "our own grant is taken for somebody else's": Mutant(
        Acquisition, "_decided", "answer.outcome is Outcome.OWN", "False", by="test_joining_a_lease_without_an_end"
    ),
    # P5 cancellation
    "nothing is undone": Mutant(
        Acquisition, "undo", "self._undo_all()", by="test_ticket_of_a_waiter_that_gives_up_in_the_gap"
    ),
    "an identity's grant is not undone": Mutant(
        IdentityAcquisition,
        "_undo_answered",
        "self._namesakes.undo(self.token, self._member)",
        "pass",
        by="test_what_was_cancelled_decides_nothing",
    ),
    "a grant that is being undone is joined": Mutant(
        IdentityAcquisition,
        "_granted",
        "self._namesakes.is_gone(self.token)",
        "False",
        by="test_p1_asked_before_a_release_and_answered_behind_it",
    ),
    "what a namesake has joined is undone": Mutant(
        IdentityRequests,
        "take_over",
        "lease.fence == fence",
        "False",
        by="test_p5_a_grant_that_a_namesake_has_joined_stays",
    ),
    "a ticket stays when its time is up": Mutant(
        Acquisition, "withdraw", "self.undo()", by="test_a_tiny_timeout_withdraws_its_request"
    ),
    "the cancelled waiter keeps a grant of the same turn": Mutant(
        Acquisition,
        "task_cancelled",
        "self._decline(self._lease)",
        "pass",
        by="test_p5_b2_grant_and_end_any_number_of_turns_apart",
    ),
    # P6 leases
    "the lease counts from the answer": Mutant(
        Acquisition,
        "answered",
        "self._granted(call.reply, call.sent,",
        "self._granted(call.reply, now(),",
        by="test_a_deadline_counts_from_before_the_send",
    ),
    "the pushed lease counts from the push": Mutant(
        Acquisition,
        "pushed",
        "granted = self._clock_offset + push.server_time",
        "granted = now()",
        by="test_the_deadline_of_a_late_push",
    ),
    "a grant can come from the future": Mutant(
        Acquisition, "pushed", "if granted <= now():", "if True:", by="test_p6_the_server_says_how_long_it_lasts"
    ),
    "the renewed lease counts from the answer": Mutant(
        Renewals,
        "apply_answer",
        "(call.sent, ttl / 1000)",
        "(now(), ttl / 1000)",
        by="test_a_deadline_counts_from_before_the_send",
    ),
    "a grant is one however late": Mutant(
        Acquisition, "_granted", "deadline <= now() + least", "False", by="test_a_reply_later_than_the_ttl_is_no_grant"
    ),
    "a claim of a moment is a grant": Mutant(
        Acquisition, "_granted", "now() + least", "now()", by="test_p1_a_claim_that_is_almost_over_is_no_grant"
    ),
    "an unanswered renewal is a loss": Mutant(
        Renewals,
        "apply_answer",
        "elif now() >= lease.deadline:",
        "else:",
        by="test_a_refusal_does_not_restore_what_another_one_may_have_cut",
    ),
    "a refused renewal is a loss": Mutant(
        Renewals,
        "apply_answer",
        "self._note_refusal(lease, call, call.error)",
        'lease.lose("unreachable")',
        by="test_an_extension_that_is_refused_changes_nothing",
    ),
    "leases are not re-checked": Mutant(
        LinkEvents, "_recheck", "hub.manager.renewals.recheck(lease)", by="test_rechecks_come_first"
    ),
    "the deadline passes unnoticed": Mutant(
        GrantManager,
        "_look_at",
        "if time >= lease.deadline:",
        "if False:",
        by="test_renewals_that_are_refused_until_the_end",
    ),
    "a lost lease lets the body run": Mutant(
        Acquiring, "__aenter__", "grant.hold = ref(self)", by="test_a_loss_cancels_the_body"
    ),
    "renewals go on beyond max_hold": Mutant(Renewals, "due", "left < math.inf", "False", by="test_it_expires"),
    # P7 exceptions
    "a refusal cuts a lease": Mutant(
        Renewals,
        "settle",
        "self._last_for(lease, unanswered.span())",
        by="test_an_extension_that_is_refused_changes_nothing",
    ),
    "a refusal restores what another renewal may have cut": Mutant(
        Renewals,
        "settle",
        "unanswered.sent.remove(sent)",
        "unanswered.answered(sent, False, True)",
        by="test_a_refusal_does_not_restore_what_another_one_may_have_cut",
    ),
    "our cancellation leaves, not LeaseLost": Mutant(
        Acquiring, "__aexit__", "not self._guard.finish(error)", "True", by="test_a_loss_cancels_the_body"
    ),
    "LeaseLost hides the body's error": Mutant(
        Acquiring,
        "__aexit__",
        "if leaving is None:\n            raise",
        "raise",
        by="test_the_right_exception_leaves_bare_with_the_rest_as_a_note",
    ),
    "LeaseLost hides a cancellation from outside": Mutant(
        CancelOnLoss,
        "finish",
        " or left > self._at_loss",
        "",
        by="test_a_cancellation_is_neither_taken_for_the_loss_nor_swallowed",
    ),
    "LeaseLost hides a cancellation that came before": Mutant(
        CancelOnLoss,
        "finish",
        "((reason := _reason_of(first_of(error))) is not None and reason.over)",
        "True",
        by="test_a_loss_in_the_clean_up_of_a_cancelled_body",
    ),
    # P12 the end
    "aclose() releases nothing": Mutant(
        GrantManager, "take_away", "self.release(lease)", by="test_p12_the_end_of_its_coordinator"
    ),
}
