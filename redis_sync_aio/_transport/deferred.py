"""Calls deferred after a temporary refusal, and later calls for the same name kept behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from .._core.backoff import Backoff
from .._core.clock import now
from ..errors._base import copy_error
from .call import Call

AFTER_REFUSAL = Backoff(initial=0.01, cap=0.25)


class Deferred:
    """The deferred calls about one name."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.refused: list[Call] = []
        self.behind: list[Call] = []

    def calls(self) -> list[Call]:
        """Return all calls in the order in which they were sent."""
        return [*self.refused, *self.behind]


class DeferredCalls:
    """Sends refused calls again after a pause (``send``), and then the calls kept behind them (``send_behind``)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[Call], None], send_behind: Callable[[Call], None]
    ) -> None:
        self._loop = loop
        self._send = send
        self._send_behind = send_behind
        self.delayed: dict[bytes, Deferred] = {}  # by name

    def keep_behind(self, call: Call) -> bool:
        """Keep a new call if an earlier call about its name is deferred; return whether so."""
        found = self.delayed.get(call.name)
        if found is None:
            return False
        if found.refused and (error := found.refused[0].connection_error) is not None:
            call.delayed_by(copy_error(error))
        found.behind.append(call)
        return True

    def join(self, call: Call) -> bool:
        """Keep a call that lost its connection if an earlier call about its name is deferred; return whether so."""
        found = self.delayed.get(call.name)
        if found is not None:
            found.refused.append(call)
        return found is not None

    def add(self, call: Call) -> None:
        """Send a refused call again after a pause."""
        self._of_name(call).refused.append(call)

    def hold(self, call: Call) -> None:
        """Send a new call after a pause, behind calls about its name that are refused until then."""
        self._of_name(call).behind.append(call)

    def _of_name(self, call: Call) -> Deferred:
        found = self.delayed.get(call.name)
        if found is None:
            delay = AFTER_REFUSAL.bound(call.attempts) * (0.5 + AFTER_REFUSAL.random() / 2)
            found = self.delayed[call.name] = Deferred(self._loop.call_later(delay, self._send_deferred, call.name))
        return found

    def _send_deferred(self, name: bytes) -> None:
        found = self.delayed.pop(name)
        for calls, send in ((found.refused, self._send), (found.behind, self._send_behind)):
            for call in calls:
                if not call.over:
                    call.sent = now()
                    send(call)

    def calls(self) -> Iterator[Call]:
        """Return all deferred calls."""
        for found in self.delayed.values():
            yield from found.calls()

    def take(self) -> list[Call]:
        """Remove and return all deferred calls."""
        calls = list(self.calls())
        for found in self.delayed.values():
            found.timer.cancel()
        self.delayed.clear()
        return calls
