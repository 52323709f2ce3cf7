"""The calls of a link that are not in flight: they wait for a connection, or for their next attempt."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .._core.clock import now
from .._core.display import text
from ..errors import Unreachable
from .call import Call
from .connection import BURST, Connection
from .deferred import DeferredCalls


class CallQueue:
    """Keeps the order of the calls about one name: what was sent first is sent again first.

    Calls that ended meanwhile may still be in it; they are never sent.
    """

    def __init__(
        self,
        send_again: Callable[[Call], None],
        send_behind: Callable[[Call], None],
        in_use: Callable[[Connection], bool],
    ) -> None:
        self._send_again = send_again
        self._in_use = in_use
        self._loop = asyncio.get_running_loop()
        self.deferred = DeferredCalls(self._loop, send_again, send_behind)
        """Calls that the server refused for now, and what was sent about the same names since."""
        self.unsent: deque[Call] = deque()
        """Calls that wait for a connection."""
        self.sending = False
        """Whether unsent calls are being sent, some in each turn of the loop: new ones have to go behind them."""

    def __bool__(self) -> bool:
        return bool(self.unsent or self.deferred.delayed)

    def calls(self) -> Iterator[Call]:
        """Return all calls."""
        yield from self.unsent
        yield from self.deferred.calls()

    def send_unsent(self, connection: Connection) -> None:
        """Send what waits for ``connection``, in several turns of the loop if that is much, while it is in use."""
        self.sending = False
        for _ in range(min(BURST, len(self.unsent)) if self._in_use(connection) else 0):
            if not (call := self.unsent.popleft()).over:
                call.sent = now()
                self._send_again(call)
        if self.unsent and self._in_use(connection):
            self.sending = True
            self._loop.call_soon(self.send_unsent, connection)

    def put_back(self, unanswered: Iterable[tuple[Call, bool]]) -> None:
        """Keep the calls of a connection that has ended, before all others.

        Each comes with whether it may have been executed.
        """
        resend: list[Call] = []
        for call, perhaps in unanswered:
            if call.over:
                continue
            call.ambiguous |= perhaps
            if call.at_most_once and perhaps:
                call.fail(Unreachable.reply_lost(text(call.name)))
            elif not self.deferred.join(call):
                resend.append(call)
        self.unsent.extendleft(reversed(resend))

    def forget_ended(self) -> None:
        """Drop unsent calls that have ended."""
        self.unsent = deque(call for call in self.unsent if not call.over)

    def hand_on(self, stays: Callable[[Call], bool]) -> None:
        """Keep unsent calls that ``stays`` selects, and send the others again, which go to other links."""
        unsent, self.unsent = self.unsent, deque()
        for call in unsent:
            if stays(call):
                self.unsent.append(call)
            elif not call.over:
                self._send_again(call)

    def take(self) -> list[Call]:
        """Remove and return all calls that have not ended."""
        calls = [call for call in (*self.unsent, *self.deferred.take()) if not call.over]
        self.unsent.clear()
        return calls
