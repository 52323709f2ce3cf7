"""Mutants of transactions: each takes one decision out of them, and at least one check has to notice.

The checks run in simulation (see `tests/support/gate.py`). The code as it is passes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from redis_sync_aio._client import checkout
from redis_sync_aio._client.checkout import CheckedOut
from redis_sync_aio._leases.lease import GrantGuard, Ownership
from redis_sync_aio._transactions import attempts
from redis_sync_aio._transactions.attempts import Attempts
from redis_sync_aio._transactions.exec_replies import CommitMarker
from redis_sync_aio._transactions.handle import GuardedTransaction, Transaction, TurnCheck
from redis_sync_aio._transactions.watch_session import WatchSession
from redis_sync_aio.embedded import EmbeddedServer

from ..support.mutants import Found, Mutant, all_pass, failing, is_caught
from ..support.transaction_checks import CHECKS, of

MUTANTS: Mapping[str, Mutant] = {
    # WATCH and EXEC
    "nothing is watched": Mutant(WatchSession, "send", '("WATCH", *self._to_watch)', '("PING",)'),
    "the guard is not watched the second time": Mutant(
        WatchSession, "begin_again", "[*self.keys, *self._also_watched]", '[b"else"]'
    ),
    "a conflict is taken for done": Mutant(
        WatchSession, "execute", "is None:\n        return None", "is None:\n        return ()"
    ),
    "what was not sent is not known": Mutant(WatchSession, "execute", "not connection.written or ", ""),
    "nobody asks whether MULTI is allowed": Mutant(WatchSession, "send", "if connection.executes", "if True"),
    "it asks each time": Mutant(CheckedOut, "check_executes", "_proven.add(writer)"),
    "a refused EXEC leaves MULTI open": Mutant(
        WatchSession, "execute", "isinstance(executed, redis.exceptions.ExecAbortError)", "True"
    ),
    # again, or not
    "a conflict is not tried again": Mutant(
        Attempts, "_commit", "if not self._again(self._conflict_delays, None):", "if True:"
    ),
    "one attempt more": Mutant(Attempts, "_again", "self._attempts >=", "self._attempts >"),
    "the deadline is ignored": Mutant(Attempts, "_again", "late or self._attempts", "self._attempts"),
    "an error before EXEC is final": Mutant(Attempts, "_pass", "is_transient(error) and", "False and"),
    "what is not known is repeated": Mutant(
        Attempts, "_unanswered", "elif executed is None and not self._terms.idempotent:", "elif False:"
    ),
    "the idempotent is not repeated": Mutant(Attempts, "_unanswered", "and not self._terms.idempotent", ""),
    "the error of the body is swallowed": Mutant(Attempts, "leave", "return False  # P7", "return True  # P7"),
    "the body's Unreachable is taken for ours": Mutant(
        attempts,
        "_connection_error_in",
        "if error is reason:\n        return reason",
        "if error:\n        return error",
    ),
    "an error in a group is the body's": Mutant(
        attempts, "_connection_error_in", "return reason if others", "return None if others"
    ),
    "an earlier EXEC is forgotten": Mutant(Attempts, "_give_up", "if not self._perhaps or", "if True or"),
    "an earlier EXEC is forgotten in a note": Mutant(Attempts, "_body_failed", "if self._perhaps:", "if False:"),
    "what is caught inside the loop ends it": Mutant(Attempts, "__anext__", "if self._left is None:", "if True:"),
    # the marker
    "the marker is not watched": Mutant(WatchSession, "__init__", "(marker.key,)", "()"),
    "the marker is not written": Mutant(WatchSession, "__init__", "(marker.done,)", "()"),
    "the marker is only looked at": Mutant(CommitMarker, "_ask", 'self._set(VOID, "NX")', '("PING",)'),
    "void goes over done": Mutant(CommitMarker, "_ask", 'self._set(VOID, "NX")', "self._set(VOID)"),
    "a marker is trusted forever": Mutant(
        CommitMarker, "find_out", "False if now() < sent + MARKER_TTL else None", "False"
    ),
    # the connection
    "it goes back watching": Mutant(
        CheckedOut, "_give_back", "if self.watching or not self.in_step:", "if not self.in_step:"
    ),
    "it goes back to a server that refuses everything": Mutant(
        WatchSession, "refused", "self._connection.in_step = False"
    ),
    "it is not given back after an error": Mutant(Transaction, "_end", "await self._session.give_back(drop)"),
    "it is lost when nobody waits for it any more": Mutant(
        checkout, "_give_back_opened", "_start_giving_back(CheckedOut(client, connecting.result()), drop=False)"
    ),
    # turns
    "nobody looks whose turn it is": Mutant(TurnCheck, "commands", "if self._turn.held", "if True"),
    "somebody else's turn does not matter": Mutant(TurnCheck, "verify", "if any(replies)", "if False"),
    "it keeps its connection while it waits": Mutant(WatchSession, "_verified", "await self.begin_again()"),
    "the turn is taken one conflict later": Mutant(
        Attempts, "_before_next", "self._conflicts >= after", "self._conflicts > after"
    ),
    "the turn is not given back": Mutant(Attempts, "_finish", "self._turn.give_back()"),
    "the one that has the turn does not wait": Mutant(
        Attempts, "_before_next", "elif self._delay:", "elif self._delay and not (turn and turn.held):"
    ),
    "waiting for the turn has no end": Mutant(
        Attempts, "_take_turn", "None if ends is None else max(0.0, self._begun + ends - now())", "None"
    ),
    # the guard
    "the token is not compared": Mutant(GrantGuard, "verify", "if reason is not None:", "if False:"),
    "any token will do": Mutant(Ownership, "loss", "holder == self.token", "holder is not None"),
    "the lock is not watched": Mutant(Ownership, "watched", "self.keys.all[:1]", "self.keys.all[1:2]"),
    "a spent permit guards": Mutant(Ownership, "loss", "else found > 0", "else True"),
    "a renewal is a conflict": Mutant(
        GuardedTransaction, "_commit_while_held", "if self._named() or now() + delay", "if True or now() + delay"
    ),
    "an unanswered guarded EXEC is repeated": Mutant(
        GuardedTransaction,
        "_commit_while_held",
        "raise OutcomeUnknown(lease=self._guard.name, attempts=1, keys=keys) from outcome.cause",
        "outcome = None",
    ),
}


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def run(private: EmbeddedServer) -> Found:
    return failing(private, [(name, of(check)) for name, check in CHECKS.items()])


def test_transactions_pass_every_check(private: EmbeddedServer) -> None:
    all_pass(run(private))
    assert len(CHECKS) >= 20


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_is_caught(private: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    mutant.apply(monkeypatch)
    is_caught(run(private))
