"""Mutants of the Python core: each takes one decision out of it, and at least one check has to notice.

The checks run in simulation (see `tests/support/gate.py`), without pushes too where that makes a difference. The
core as it is passes all of them. The mutants of the scripts are in `test_mutants.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from redis_sync_aio._leases import manager as releases
from redis_sync_aio._leases.acquisition import Acquisition, IdentityAcquisition
from redis_sync_aio._leases.hold import Acquiring, CancelOnLoss
from redis_sync_aio._leases.hub import LinkEvents
from redis_sync_aio._leases.identities import IdentityRequests
from redis_sync_aio._leases.manager import GrantManager
from redis_sync_aio._leases.renewals import Renewals
from redis_sync_aio._leases.waits import Healing
from redis_sync_aio._transport.link import CallQueue
from redis_sync_aio.embedded import EmbeddedServer

from ..support.core_checks import CHECKS, Found, all_pass, check_schedules, failing, is_caught, of
from ..support.mutants import Mutant

MUTANTS: Mapping[str, Mutant] = {
    # P3 wake-up
    "waiters are not re-checked": Mutant(LinkEvents, "_recheck", "acquisition.recheck()"),
    "nobody looks again": Mutant(Healing, "_look", "acquisition.ask()"),
    "a look only when the lease should have ended": Mutant(
        Healing, "queued", "min(left + EARLY, delay)", "left + EARLY"
    ),
    "the claim is the whole ttl": Mutant(
        Acquisition, "_name_request", "min(request.ttl_ms, hub.claim_ms)", "request.ttl_ms"
    ),
    "the claim is all that a lease without renewals gets": Mutant(
        Acquisition, "_name_request", "if request.auto_renew else request.ttl_ms", ""
    ),
    "a claim is renewed after a third, as a ttl": Mutant(
        Acquisition, "_granted", "resource.hub.manager.renewals.renew_claim_soon(lease)"
    ),
    # P4 replay
    "GONE is lost, whatever happened before": Mutant(
        releases,
        "release_error",
        "((call.ambiguous or lease.release_uncertain) and call.sent < lease.deadline)",
        "False",
    ),
    "a lost connection is no doubt": Mutant(CallQueue, "put_back", "call.ambiguous |= perhaps"),
    "what was not answered is not sent again": Mutant(
        CallQueue, "put_back", "self.unsent.extendleft(reversed(resend))"
    ),
    "a force_release is repeated": Mutant(CallQueue, "put_back", "if call.at_most_once and perhaps:", "if False:"),
    "our own grant is taken for somebody else's": Mutant(
        Acquisition, "_decided", "answer.outcome is Outcome.OWN", "False"
    ),
    # P5 cancellation
    "nothing is undone": Mutant(Acquisition, "undo", "self._undo_all()"),
    "an identity's grant is not undone": Mutant(
        IdentityAcquisition, "_undo_answered", "self._namesakes.undo(self.token, self._member)", "pass"
    ),
    "a grant that is being undone is joined": Mutant(
        IdentityAcquisition, "_granted", "self._namesakes.is_gone(self.token)", "False"
    ),
    "what a namesake has joined is undone": Mutant(IdentityRequests, "take_over", "lease.fence == fence", "False"),
    "a ticket stays when its time is up": Mutant(Acquisition, "withdraw", "self.undo()"),
    "the cancelled waiter keeps a grant of the same turn": Mutant(
        Acquisition, "task_cancelled", "self._decline(self._lease)", "pass"
    ),
    # P6 leases
    "the lease counts from the answer": Mutant(
        Acquisition, "answered", "self._granted(call.reply, call.sent,", "self._granted(call.reply, now(),"
    ),
    "the pushed lease counts from the push": Mutant(
        Acquisition, "pushed", "granted = self._clock_offset + push.server_time", "granted = now()"
    ),
    "a grant can come from the future": Mutant(Acquisition, "pushed", "if granted <= now():", "if True:"),
    "the renewed lease counts from the answer": Mutant(
        Renewals, "apply_answer", "(call.sent, ttl / 1000)", "(now(), ttl / 1000)"
    ),
    "a grant is one however late": Mutant(Acquisition, "_granted", "deadline <= now() + least", "False"),
    "a claim of a moment is a grant": Mutant(Acquisition, "_granted", "now() + least", "now()"),
    "an unanswered renewal is a loss": Mutant(Renewals, "apply_answer", "elif now() >= lease.deadline:", "else:"),
    "a refused renewal is a loss": Mutant(
        Renewals,
        "apply_answer",
        "self._note_refusal(lease, call, call.error)",
        'lease.lose("unreachable")',
    ),
    "leases are not re-checked": Mutant(LinkEvents, "_recheck", "hub.manager.renewals.recheck(lease)"),
    "the deadline passes unnoticed": Mutant(GrantManager, "_look_at", "if time >= lease.deadline:", "if False:"),
    "a lost lease lets the body run": Mutant(Acquiring, "__aenter__", "grant.hold = ref(self)"),
    "renewals go on beyond max_hold": Mutant(Renewals, "due", "left < math.inf", "False"),
    # P7 exceptions
    "a refusal cuts a lease": Mutant(Renewals, "settle", "self._last_for(lease, unanswered.span())"),
    "a refusal restores what another renewal may have cut": Mutant(
        Renewals,
        "settle",
        "unanswered.sent.remove(sent)",
        "unanswered.answered(sent, False, True)",
    ),
    "our cancellation leaves, not LeaseLost": Mutant(Acquiring, "__aexit__", "not self._guard.finish(error)", "True"),
    "LeaseLost hides the body's error": Mutant(
        Acquiring, "__aexit__", "if leaving is None:\n            raise", "raise"
    ),
    "LeaseLost hides a cancellation from outside": Mutant(CancelOnLoss, "finish", " or left > self._at_loss", ""),
    "LeaseLost hides a cancellation that came before": Mutant(
        CancelOnLoss, "finish", "((reason := _reason_of(first_of(error))) is not None and reason.over)", "True"
    ),
    # P12 the end
    "aclose() releases nothing": Mutant(GrantManager, "take_away", "self.release(lease)"),
}


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def run(private: EmbeddedServer) -> Found:
    ways = {"link": True, "plain": False}
    trials = [(f"{name}, {way}", of(check, link)) for name, check in CHECKS.items() for way, link in ways.items()]
    return failing(private, trials, check_schedules)


@pytest.mark.ci
def test_the_core_passes_every_check(private: EmbeddedServer) -> None:
    all_pass(run(private))
    assert len(CHECKS) >= 15


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_is_caught(private: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    mutant.apply(monkeypatch)
    is_caught(run(private))
