"""The proxy of `redis_sync_aio.testing`, and the names by which the suite knows its faults."""

from __future__ import annotations

from redis_sync_aio.testing import (
    CUT_AFTER,
    CUT_AFTER_REPLY,
    CUT_BEFORE,
    CUT_INSIDE_REPLY,
    DROP,
    DUPLICATE,
    HOLD,
    HOLD_REPLY,
    PASS,
    SWALLOW_REPLY,
    SWALLOW_REQUEST,
    Action,
    FaultProxy,
    Match,
    Passage,
    Rule,
    answer_error,
    anything,
    arg,
    command,
    delay,
    delay_reply,
    script,
)

DELAY = DELAY_REQUEST = delay
DELAY_REPLY = delay_reply
ERROR = answer_error

__all__ = [
    "CUT_AFTER",
    "CUT_AFTER_REPLY",
    "CUT_BEFORE",
    "CUT_INSIDE_REPLY",
    "DELAY",
    "DELAY_REPLY",
    "DELAY_REQUEST",
    "DROP",
    "DUPLICATE",
    "ERROR",
    "HOLD",
    "HOLD_REPLY",
    "PASS",
    "SWALLOW_REPLY",
    "SWALLOW_REQUEST",
    "Action",
    "FaultProxy",
    "Match",
    "Passage",
    "Rule",
    "anything",
    "arg",
    "command",
    "script",
]
