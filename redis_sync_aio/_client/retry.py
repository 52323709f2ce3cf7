"""The number of retries of a command, and the time for them."""

from __future__ import annotations

from .._core.backoff import Backoff

RETRY_FOR = 10.0
"""Seconds for which a command is retried while Redis is unreachable, unless the caller sets another limit."""

RETRY = Backoff(initial=0.01, cap=0.5)
"""Pauses between attempts where no link reconnects by itself."""

MIN_ATTEMPT = 0.05
"""Minimum seconds per attempt, even past the deadline: an interrupted attempt has an unknown outcome."""

AFTER_CONFLICT = Backoff(initial=0.0005, cap=0.02)
"""Pauses between attempts after a watched key was changed."""
