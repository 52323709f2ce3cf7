"""Calls that the server refused for now: sent again after a while, with whatever was sent about the same name since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from .._core.backoff import Backoff
from .._core.clock import now
from ..errors import copy_error
from .call import Call

NOT_NOW = Backoff(initial=0.01, cap=0.25)


class Delayed:
    """Those about one name."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.refused: list[Call] = []
        self.behind: list[Call] = []

    def calls(self) -> list[Call]:
        """Return all of them, in the order in which they were sent."""
        return [*self.refused, *self.behind]


class DeferredCalls:
    """See the top of this module. ``send`` sends one again, ``send_behind`` one that was sent after those."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[Call], None], send_behind: Callable[[Call], None]
    ) -> None:
        self._loop = loop
        self._send = send
        self._send_behind = send_behind
        self.delayed: dict[bytes, Delayed] = {}  # by name

    def keeps_behind(self, call: Call) -> bool:
        """Keep a new call if an earlier one about its name waits here; return whether it does."""
        found = self.delayed.get(call.name)
        if found is None:
            return False
        if found.refused and (error := found.refused[0].connection_error) is not None:
            call.connection_error = copy_error(error)
        found.behind.append(call)
        return True

    def joins(self, call: Call) -> bool:
        """Keep a call that lost its connection if an earlier one about its name waits here; return whether it does."""
        found = self.delayed.get(call.name)
        if found is not None:
            found.refused.append(call)
        return found is not None

    def add(self, call: Call) -> None:
        """Send ``call`` again after a while."""
        self._about(call).refused.append(call)

    def hold(self, call: Call) -> None:
        """Send a new call after a while, behind those about its name that are refused until then."""
        self._about(call).behind.append(call)

    def _about(self, call: Call) -> Delayed:
        found = self.delayed.get(call.name)
        if found is None:
            delay = NOT_NOW.bound(call.attempts) * (0.5 + NOT_NOW.random() / 2)
            found = self.delayed[call.name] = Delayed(self._loop.call_later(delay, self._again, call.name))
        return found

    def _again(self, name: bytes) -> None:
        found = self.delayed.pop(name)
        for calls, send in ((found.refused, self._send), (found.behind, self._send_behind)):
            for call in calls:
                if not call.over:
                    call.sent = now()
                    send(call)

    def calls(self) -> Iterator[Call]:
        """Return all calls that wait here."""
        for found in self.delayed.values():
            yield from found.calls()

    def take(self) -> list[Call]:
        """Hand all of them over."""
        calls = list(self.calls())
        for found in self.delayed.values():
            found.timer.cancel()
        self.delayed.clear()
        return calls
