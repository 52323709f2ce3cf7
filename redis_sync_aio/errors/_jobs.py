"""Errors of work that is done once."""

from __future__ import annotations

from ._base import SyncError


class FingerprintMismatch(SyncError, ValueError):
    """Two different requests used the same name of `idempotent`. The second one did not run.

    Give each request a name of its own; see [`idempotent`][redis_sync_aio.idempotent].

    Attributes:
        name: The name of the run, with the arguments of the call in it.
    """

    def __init__(self, *, name: str) -> None:
        super().__init__(
            f"{name!r} was used for another request, with another fingerprint: give each request its own name"
        )
        self.name = name


class ResultNotKept(SyncError):
    """An earlier run for this name returned, and its result could not be kept for later calls. It did not run again.

    The effects of that run are there, and its caller got its result. Fix the cause (mostly a result that the codec
    cannot represent), and ask the other system for the result.

    Attributes:
        name: The name of the run, with the arguments of the call in it.
        mark: The key of the mark on the server.
        cause: What failed.
    """

    def __init__(self, *, name: str, mark: str, cause: str) -> None:
        super().__init__(
            f"a run for {name!r} returned, but its result was not kept: {cause}; it does not run again. Fix the cause, "
            f"and find out what the run did. To let it run again, delete {mark!r}"
        )
        self.name = name
        self.mark = mark
        self.cause = cause


class RunInterrupted(SyncError):
    """An earlier run for this name began and did not end, and ``on_crash="raise"`` forbids a second run.

    The effects of that run are unknown. Find out what it did. Then delete the mark to let it run again.

    Attributes:
        name: The name of the run, with the arguments of the call in it.
        mark: The key of the mark on the server.
    """

    def __init__(self, *, name: str, mark: str) -> None:
        super().__init__(
            f"a run for {name!r} began and did not come to its end, so its effects are unknown: find out what it did. "
            f"To let it run again, delete {mark!r}"
        )
        self.name = name
        self.mark = mark
