"""The ledger that most tests run with finds requests that have no end, or two."""

from __future__ import annotations

import pytest

from redis_sync_aio.instrumentation import Event, Granted, Lost, Released, Requested, Withdrawn

from ...support.balance import Ledger

REQUEST = {"kind": "lock", "name": "x", "pattern": "x", "server": "", "time": 0.0, "request": 7}
REQUESTED = Requested(**REQUEST)  # type: ignore[arg-type]
GRANTED = Granted(**REQUEST, waited=0.0, contended=False, fence=1, token="t")  # type: ignore[arg-type]
WITHDRAWN = Withdrawn(**REQUEST, outcome="taken", waited=0.0, error=None)  # type: ignore[arg-type]
RELEASED = Released(**REQUEST, held=0.0)  # type: ignore[arg-type]
LOST = Lost(**REQUEST, reason="closed", time_is_up=False, held=0.0)  # type: ignore[arg-type]


def books(*events: Event) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger(event)
    return ledger


@pytest.mark.parametrize(
    "events", [(), (REQUESTED, WITHDRAWN), (REQUESTED, GRANTED, RELEASED), (REQUESTED, GRANTED, LOST)]
)
def test_whole_stories_balance(events: tuple[Event, ...]) -> None:
    books(*events).check()


@pytest.mark.parametrize(
    "events",
    [
        (REQUESTED,),
        (REQUESTED, GRANTED),
        (GRANTED, RELEASED),
        (REQUESTED, RELEASED),
        (REQUESTED, WITHDRAWN, WITHDRAWN),
        (REQUESTED, GRANTED, WITHDRAWN),
        (REQUESTED, GRANTED, RELEASED, LOST),
        (REQUESTED, REQUESTED, WITHDRAWN),
    ],
)
def test_other_stories_do_not(events: tuple[Event, ...]) -> None:
    with pytest.raises(AssertionError, match=r"no end|out of turn"):
        books(*events).check()
