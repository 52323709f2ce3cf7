"""The balance of requests: each has one end, whatever was cancelled, cut off, refused or closed meanwhile.

Tests in some folders run with a `Ledger` that observes all coordinators, and fail if its books do not balance after the
last fixture. The others run without an observer, since that takes other paths through the package.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from redis_sync_aio.instrumentation import (
    Event,
    Granted,
    Lost,
    Released,
    RenewedLate,
    Requested,
    Withdrawn,
    observe_all,
)

from .inside import Attached

OBSERVED = ("tests/conformance/", "tests/faults/", "tests/recovery/", "tests/cluster/", "tests/primitives/")
"""The folders whose tests are observed."""
REMEMBERS = ("tests/conformance/test_cancellation.py", "tests/conformance/test_loss.py", "tests/faults/test_wire.py")
"""Tests that forget no lease. (Others do: a crash, say, is a coordinator that nothing refers to any more.)"""


class Ledger:
    """Books of all requests: what is open, and what must not have happened."""

    def __init__(self, *, forgets: bool = True) -> None:
        """``forgets``: whether a lease may be forgotten; if not, the end of one that is was not told when it came."""
        self._forgets = forgets
        self._waiting: dict[int, Event] = {}
        self._held: dict[int, Event] = {}
        self.wrong: list[str] = []

    def __call__(self, event: Event) -> None:
        """Take an event; note it as wrong if it is not the next one of its request."""
        request = event.request
        if isinstance(event, Requested):
            self._expect(request not in self._waiting and request not in self._held, event)
            self._waiting[request] = event
        elif isinstance(event, Granted):
            self._expect(self._waiting.pop(request, None) is not None, event)
            self._held[request] = event
        elif isinstance(event, Withdrawn):
            self._expect(self._waiting.pop(request, None) is not None, event)
        elif isinstance(event, (Released, Lost)):
            self._expect(self._held.pop(request, None) is not None, event)
            self._expect(self._forgets or not isinstance(event, Lost) or event.reason != "forgotten", event)
        elif isinstance(event, RenewedLate):
            self._expect(request in self._held, event)

    def _expect(self, right: bool, event: Event) -> None:
        if not right:
            self.wrong.append(f"out of turn: {event}")

    def found(self) -> list[str]:
        """Return what is wrong: events out of turn, and requests without an end."""
        return [*self.wrong, *(f"no end: {event}" for event in (*self._waiting.values(), *self._held.values()))]

    def check(self) -> None:
        """Fail unless every request has had one end."""
        assert not self.found(), "\n" + "\n".join(self.found())


class Books:
    """A pytest plugin: a ledger for each test that is observed."""

    def __init__(self) -> None:
        self._open: tuple[int, Ledger, Attached] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Observe before the first fixture makes anything."""
        if item.nodeid.startswith(OBSERVED):
            ledger = Ledger(forgets=not item.nodeid.startswith(REMEMBERS))
            self._open = os.getpid(), ledger, observe_all(ledger)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Check the balance after the last fixture has ended what it made."""
        try:
            return (yield)
        finally:
            if self._open is not None:
                process, ledger, attached = self._open
                self._open = None
                attached.close()
                if process == os.getpid():
                    ledger.check()
