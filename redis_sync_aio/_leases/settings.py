"""The settings of a coordinator's leases, in one object that their managers share."""

from __future__ import annotations

from dataclasses import dataclass

from .._client.settings import RedisClient


@dataclass(frozen=True)
class LeaseSettings:
    """The client and the time limits of the leases of one coordinator; all times in seconds."""

    client: RedisClient
    retry_for: float
    response_timeout: float
    asked_response_timeout: float | None
    """The time to wait for an answer, as the caller chose it; None: the timeout of its client."""
    exit_timeout: float
    """The time that a failed body waits for its release."""
