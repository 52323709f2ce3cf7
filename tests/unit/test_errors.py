"""P12: errors survive what errors go through: other processes, other tasks."""

from __future__ import annotations

import copy
import pickle
from typing import get_args

import pytest
from redis.exceptions import ResponseError

from redis_sync_aio import errors
from redis_sync_aio.errors import (
    AcquireTimeout,
    BrokenBarrierError,
    Conflict,
    CoordinatorClosed,
    FingerprintMismatch,
    LeaseLost,
    LimitMismatch,
    LossReason,
    NotHeld,
    NotReplicated,
    OutcomeUnknown,
    PartiallyApplied,
    QueueFull,
    ResultNotKept,
    RunInterrupted,
    StaleFence,
    StaleWriter,
    SyncError,
    TransactionMisuse,
    UndoFailed,
    UnknownStep,
    Unreachable,
    WaitTimeout,
    WouldDeadlock,
    WrongKeyType,
)

from ..support.inside import Misuse, copy_error, refusal

ERRORS = [
    AcquireTimeout("x", name="x", remaining=1.5, held_by="web-3:812"),
    LeaseLost(name="x", reason="taken", fence=7, held_for=1.5, given_back=("y",), servers=(1, 3, 2)),
    LimitMismatch(name="x", expected=2, found=3),
    BrokenBarrierError(name="x", broken=True),
    BrokenBarrierError(name="x", broken=False),
    WaitTimeout(name="x", within=1, closed="it has not been set"),
    WaitTimeout(name="x", within=None, closed="it has not been set", answered=False),
    QueueFull(name="x", waiting=1, max_waiting=1, remaining=1.5),
    NotReplicated(name="x", replicas=2, found=1, within=1.0),
    StaleFence(name="x", fence=1, highest=2),
    UnknownStep(name="x", steps=("a", "b"), known=()),
    UndoFailed.of_steps([ValueError("a"), KeyError("b")], steps=3, after="ValueError"),
    refusal(b"x", "ERR no"),
    refusal(b"x", "OOM full"),
    Conflict(attempts=3, conflicts=2, elapsed=0.5, keys=("a",)),
    OutcomeUnknown(attempts=1, keys=("a",)),
    PartiallyApplied(replies=(1, ResponseError("no")), command="GET", index=1, failed=1),
    NotHeld.released("x"),
    FingerprintMismatch(name="x"),
    ResultNotKept(name="x", mark="{x}:mark", cause="TypeError: no"),
    RunInterrupted(name="x", mark="{x}:mark"),
    StaleWriter(name="a", identity="w", fence=7),
]

ABOUT_A_LOCK = [
    WouldDeadlock.own_body("x", fence=7, use="go on"),
    NotHeld.released("x", before="it was used"),
    Unreachable.minority("x", answered=1, servers=3, needed=2, seconds=0.2),
    WrongKeyType.not_ours("x", what="the record", key="{x}:record", problem="not JSON"),
    AcquireTimeout.taken("x", remaining=1.5, data="'value'"),
    refusal(b"x", "WRONGTYPE a list", keys=(b"x", b"{x}:queue"), again=True),
    UndoFailed.of_steps([ValueError("a")], steps=2, lock="x"),
    TransactionMisuse.other_slot("x", key="y"),
    Conflict(attempts=3, conflicts=3, elapsed=0.5, keys=("x",), more_attempts=True),
    Conflict(attempts=1, conflicts=3, elapsed=0.5, keys=(), lease="x"),
    OutcomeUnknown(attempts=1, keys=(), lease="x"),
]
"""The situations in which an error is about one lock, or one key: "x"."""
ABOUT_NONE = [
    *(TransactionMisuse.of(misuse, "GET", "NOPERM") for misuse in Misuse),
    UndoFailed.too_long("refund", seconds=1.5, ended=True),
    CoordinatorClosed.used("it was closed"),
]


def look(error: BaseException) -> tuple[object, ...]:
    attributes = {name: repr(value) for name, value in vars(error).items()}
    return type(error), str(error), error.args[0], attributes


def test_the_list_has_every_error_with_attributes() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SyncError)}
    with_attributes = {kind for kind in own if "__init__" in vars(kind)}
    assert with_attributes <= {type(error) for error in ERRORS}


@pytest.mark.parametrize("more", [{}, {"stalled": 9.0}, {"time_is_up": True}, {"claim": 4.5}], ids=str)
@pytest.mark.parametrize("reason", get_args(LossReason))
def test_after_every_loss_the_message_forbids_further_writes(reason: LossReason, more: dict[str, float]) -> None:
    """Whatever ended the lease, another client may hold the lock by now."""
    assert "Do not write any more; " in str(LeaseLost(name="x", reason=reason, **more))  # type: ignore[arg-type]


def test_each_situation_is_worded_once_and_names_its_lock() -> None:
    situations = {name for kind in vars(errors).values() if isinstance(kind, type) for name in static_methods(kind)}
    assert len(ABOUT_A_LOCK) + len(ABOUT_NONE) == len(situations) + len(Misuse) + 3, "and four made from facts"
    messages = [str(error) for error in ABOUT_A_LOCK]
    assert [message for message in messages if "'x'" not in message] == []
    messages += [str(error) for error in ABOUT_NONE]
    assert len(set(messages)) == len(messages)


def static_methods(kind: type) -> list[str]:
    """Names of the situations that a class has messages for."""
    return [
        f"{kind.__name__}.{name}"
        for name, value in vars(kind).items()
        if isinstance(value, staticmethod) and not name.startswith("_")
    ]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_repr_shows_class_and_message(error: SyncError) -> None:
    """Also of those that are redis-py's ConnectionError, whose repr shows neither."""
    shown = repr(error)
    assert shown.startswith(type(error).__name__)
    assert str(error.args[0]) in shown.replace("\\'", "'")


@pytest.mark.parametrize("error", [*ERRORS, *ABOUT_A_LOCK, *ABOUT_NONE], ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled_and_copied(error: SyncError) -> None:
    error.add_note("in the body")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert twin is not error
        assert look(twin) == look(error)


def test_a_copy_for_another_task_keeps_the_cause_and_shares_no_notes() -> None:
    error = AcquireTimeout.taken("x", remaining=None)
    error.__cause__ = OSError("away")
    error.add_note("of both")
    twin = copy_error(error)
    assert twin.__cause__ is error.__cause__
    twin.add_note("of one task")
    assert error.__notes__ == ["of both"]
