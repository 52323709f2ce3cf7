"""Errors of work that is done once."""

from __future__ import annotations

from ._base import SyncError


class FingerprintMismatch(SyncError, ValueError):
    """Two different requests used the same key of `idempotent`. The second one did not run.

    Give each request a key of its own; see [`idempotent`][redis_sync_aio.jobs.idempotent].

    Attributes:
        key: The key of the run, as the caller gave it.
    """

    def __init__(self, *, key: str) -> None:
        super().__init__(
            f"{key!r} was used for another request, with another fingerprint: give each request its own key"
        )
        self.key = key


class RunInterrupted(SyncError):
    """An earlier run for this key began and did not end, and ``on_interrupted="raise"`` forbids a second run.

    The effects of that run are unknown. Find out what it did, and use another key for a new attempt.

    Attributes:
        key: The key of the run, as the caller gave it.
    """

    def __init__(self, *, key: str) -> None:
        super().__init__(
            f"a run for {key!r} began and did not come to its end, so its effects are unknown: find out what it did, "
            "and use another key for a new attempt"
        )
        self.key = key
