"""Dialogues over a connection that carries other commands, too: one at a time, in order for each name.

EXEC ends every WATCH of its connection, so a second dialogue has to wait for the end of the first. Scripts and
other commands may go in between: a key that they change is a conflict like any other.

The calls of one name are executed in the order in which they were sent, which keeps a clean-up behind the command
that it cleans up. A call in conflict is tried again, after a pause if that happens often; meanwhile other names
have their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from .._client.replies import Reply, ReplyError, Words
from .._client.settings import AFTER_CONFLICT
from .._core.clock import now
from ..errors import SyncError
from .call import Call, not_understood

Dialogue: TypeAlias = Generator[list[Words], list[Reply], Reply]
"""A conversation under WATCH, which returns the outcome of a call.

It yields commands that leave in one write, and is sent their replies, error replies as `ReplyError` among them. While
it lasts, no other dialogue may begin on the same connection.
"""

Converse: TypeAlias = Callable[[Call], Dialogue]
"""Starts one attempt at a call."""


class LocalInbox(NamedTuple):
    """Our inbox and the callback for messages that a dialogue addresses to it."""

    channel: bytes
    deliver: Callable[[bytes], object]


NOWHERE = LocalInbox(b"", id)
"""Stands for "no inbox": no inbox has an empty name."""


class _Conflict(Enum):
    CONFLICT = "conflict"


CONFLICT: Final = _Conflict.CONFLICT
"""Outcome of a dialogue whose watched keys were changed: nothing was executed."""


def advance(dialogue: Dialogue, name: bytes, replies: list[Reply] | None) -> list[Words]:
    """Return the next commands of a dialogue about ``name``.

    Raise StopIteration with its outcome, ReplyError, or SyncError if it cannot use ``replies``.
    """
    try:
        # A generator that has not started accepts only None.
        return dialogue.send(replies)  # type: ignore[arg-type]
    except (StopIteration, ReplyError):
        raise
    except Exception as error:
        raise not_understood(name, error) from error


class ProvingConverse:
    """A `Converse` that first finds out, once, whether MULTI and EXEC are allowed on its connection.

    If only MULTI were refused, the commands behind it would be executed immediately.
    """

    def __init__(self, converse: Converse) -> None:
        self._converse = converse
        self._proven = False

    def __call__(self, call: Call) -> Dialogue:
        if not self._proven:
            for reply in (yield [(b"MULTI",), (b"EXEC",)]):
                if isinstance(reply, ReplyError):
                    raise reply
            self._proven = True
        return (yield from self._converse(call))


class Exchange:
    """Commands that were sent together; ``done`` gets their replies after the last reply."""

    __slots__ = ("_done", "_missing", "_replies", "sent")

    def __init__(self, number: int, done: Callable[[list[Reply]], None]) -> None:
        self.sent = now()
        self._missing = number
        self._replies: list[Reply] = []
        self._done = done

    def put(self, reply: Reply) -> None:
        """Take the next reply."""
        self._replies.append(reply)
        self._missing -= 1
        if not self._missing:
            self._done(self._replies)


class DialogueQueue:
    """The dialogues of one connection. Those left when the connection ends start again on the next one."""

    def __init__(
        self,
        converse: Converse,
        exchange: Callable[[list[Words], Callable[[list[Reply]], None]], None],
        on_error: Callable[[Call, str], None],
    ) -> None:
        self._converse = ProvingConverse(converse)
        self._exchange = exchange
        self._on_error = on_error
        self._calls: dict[bytes, deque[Call]] = {}  # by name; no deque is empty
        self._ready: deque[bytes] = deque()  # the names whose first call may be tried, each once
        self._pauses: dict[Call, Iterator[float]] = {}  # the pauses of each call that was tried before
        self._current: Call | None = None
        self._dialogue: Dialogue
        self._stopped = False

    def end(self) -> None:
        """Stop: the connection has ended, and the remaining calls start again on the next one."""
        self._stopped = True

    def add(self, call: Call) -> None:
        """Execute ``call`` after the earlier ones about the same name."""
        calls = self._calls.get(call.name)
        if calls is not None:
            calls.append(call)
            return
        self._calls[call.name] = deque([call])
        self._ready.append(call.name)
        self._begin()

    def unanswered(self) -> Iterator[tuple[Call, bool]]:
        """Return the unanswered calls, in order for each name, each with whether it may have been executed."""
        for calls in self._calls.values():
            for call in calls:
                yield call, call is self._current

    def _begin(self) -> None:
        """Begin the next dialogue, unless one is in progress."""
        while self._current is None and self._ready:
            call = self._calls[self._ready.popleft()][0]
            if call.over:  # it was withdrawn, and nothing was executed
                self._finish(call)
                continue
            if call not in self._pauses:
                self._pauses[call] = iter(AFTER_CONFLICT)
                call.attempts += 1
            self._current = call
            call.sent = now()
            self._dialogue = self._converse(call)
            self._advance(None)

    def _advance(self, replies: list[Reply] | None) -> None:
        call = self._current
        assert call is not None
        try:
            batch = advance(self._dialogue, call.name, replies)
        except StopIteration as end:
            self._current = None
            self._ended(call, end.value)
        except (ReplyError, SyncError) as error:
            self._exchange([(b"UNWATCH",)], lambda _: None)
            self._current = None
            self._finish(call)
            if isinstance(error, SyncError):
                call.fail(error)
            else:
                self._on_error(call, str(error))
        else:
            self._exchange(batch, self._advance)
            return
        self._begin()

    def _ended(self, call: Call, reply: Reply) -> None:
        if reply is CONFLICT and not call.over:
            delay = next(self._pauses[call])
            asyncio.get_running_loop().call_later(delay, self._retry, call.name)
            return
        self._finish(call)
        if reply is not CONFLICT:
            call.answer(reply)

    def _retry(self, name: bytes) -> None:
        if self._stopped:
            return
        self._ready.append(name)
        self._begin()

    def _finish(self, call: Call) -> None:
        self._pauses.pop(call, None)
        calls = self._calls[call.name]
        calls.popleft()
        if calls:
            self._ready.append(call.name)
        else:
            del self._calls[call.name]
