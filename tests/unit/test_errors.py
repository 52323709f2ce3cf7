"""P12: errors survive what errors go through: other processes, other tasks."""

from __future__ import annotations

import copy
import pickle

import pytest
from redis.exceptions import ResponseError

from redis_sync_aio import errors
from redis_sync_aio.errors import (
    AcquireTimeout,
    CommandRefused,
    Conflict,
    LeaseLost,
    LimitMismatch,
    NotHeld,
    OutcomeUnknown,
    OutOfMemory,
    PartiallyApplied,
    StaleFence,
    StaleWriter,
    SyncError,
    UndoFailed,
    UnknownStep,
    Unreachable,
    copy_error,
)

ERRORS = [
    AcquireTimeout("late", name="x", remaining=1.5),
    LeaseLost(name="x", reason="taken", fence=7, held_for=1.5, given_back=("y",), servers=(1, 3, 2)),
    LimitMismatch(name="x", expected=2, found=3),
    StaleFence(name="x", fence=1, highest=2),
    UnknownStep(name="x", steps=("a", "b"), known=()),
    UndoFailed("two failed", [ValueError("a"), KeyError("b")]),
    CommandRefused("no", code="ERR"),
    OutOfMemory("full", code="OOM"),
    Conflict(attempts=3, conflicts=2, elapsed=0.5, keys=("a",)),
    OutcomeUnknown(attempts=1, keys=("a",)),
    PartiallyApplied(replies=(1, ResponseError("no")), command="GET", index=1, failed=1),
    Unreachable.reply_lost("x"),
    NotHeld.released("x"),
    StaleWriter(name="a", identity="w", fence=7),
]


def look(error: BaseException) -> tuple[object, ...]:
    attributes = {name: repr(value) for name, value in vars(error).items()}
    return type(error), str(error), error.args[0], attributes


def test_the_list_has_every_error_with_attributes() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SyncError)}
    with_attributes = {kind for kind in own if "__init__" in vars(kind)}
    assert with_attributes <= {type(error) for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_repr_shows_class_and_message(error: SyncError) -> None:
    """Also of those that are redis-py's ConnectionError, whose repr shows neither."""
    shown = repr(error)
    assert shown.startswith(type(error).__name__)
    assert str(error.args[0]) in shown.replace("\\'", "'")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled_and_copied(error: SyncError) -> None:
    error.add_note("in the body")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert twin is not error
        assert look(twin) == look(error)


def test_a_copy_for_another_task_keeps_the_cause_and_shares_no_notes() -> None:
    error = AcquireTimeout("late", name="x", remaining=None)
    error.__cause__ = OSError("away")
    error.add_note("of both")
    twin = copy_error(error)
    assert twin.__cause__ is error.__cause__
    twin.add_note("of one task")
    assert error.__notes__ == ["of both"]
