"""Errors of work that is done once."""

from __future__ import annotations

from ._base import SyncError


class FingerprintMismatch(SyncError, ValueError):
    """A key of `redis_sync_aio.jobs.idempotent` was used for two different requests. The second one did not run.

    ``key`` is that key.
    """

    def __init__(self, *, key: str) -> None:
        super().__init__(
            f"{key!r} was used for another request, with another fingerprint: give each request its own key"
        )
        self.key = key


class RunInterrupted(SyncError):
    """A run for this key began and did not come to its end, and ``on_interrupted="raise"`` runs it no second time.

    ``key`` is that key.
    """

    def __init__(self, *, key: str) -> None:
        super().__init__(
            f"a run for {key!r} began and did not come to its end, so its effects are unknown: find out what it did, "
            "and use another key for a new attempt"
        )
        self.key = key
