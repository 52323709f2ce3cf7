"""Programs start as from a terminal, however the tests were started."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> Iterator[None]:
    """Undo what ``nohup``, or ``&`` in a script, has the tests ignore: their programs would inherit that."""
    ignored = [it for it in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if signal.getsignal(it) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
