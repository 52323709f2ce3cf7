"""The proxy of `redis_sync_aio.testing`, and the names by which the suite knows its faults."""

from __future__ import annotations

from redis_sync_aio.testing.faults import Action, FaultProxy, Match, Passage, Rule, anything, arg, command, script

PASS = Action.PASS
CUT_BEFORE = Action.CUT_BEFORE
CUT_AFTER = Action.CUT_AFTER
CUT_INSIDE_REPLY = Action.CUT_INSIDE_REPLY
CUT_AFTER_REPLY = Action.CUT_AFTER_REPLY
SWALLOW_REQUEST = Action.SWALLOW_REQUEST
SWALLOW_REPLY = Action.SWALLOW_REPLY
HOLD = Action.HOLD
HOLD_REPLY = Action.HOLD_REPLY
DUPLICATE = Action.DUPLICATE
DROP = Action.DROP
DELAY = DELAY_REQUEST = Action.delay
DELAY_REPLY = Action.delay_reply
ERROR = Action.answer_error
