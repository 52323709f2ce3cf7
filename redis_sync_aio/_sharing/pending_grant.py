"""Requests of a cohort to the server."""

from __future__ import annotations

from typing import Protocol

from .._acquire.acquisition import Acquisition
from .._acquire.request import Request
from .._acquire.resource import Resource
from .._leases.grant import Grant
from .holdings import Awaited


class Requester(Protocol):
    """A cohort, as its requests know it."""

    resource: Resource
    limit: int

    def of_process(self, request: Request) -> Request: ...
    def opened(self, pending: PendingGrant, lease: Grant | None) -> None: ...
    def refused(self, pending: PendingGrant, error: Exception) -> None: ...


class PendingGrant:
    """A request to the server for the next grant of its cohort."""

    _done = False

    def __init__(self, cohort: Requester, request: Request, only: Awaited | None, serial: int) -> None:
        self._cohort = cohort
        self.only = only  # the task that does not wait; None: the first task in the line
        self.wants = request
        self.limit = cohort.limit  # the limit at that time
        self.serial = serial
        self.acquisition = Acquisition(cohort.resource, cohort.of_process(request), self)

    def done(self) -> bool:
        return self._done

    def set_result(self, lease: Grant | None, /) -> None:
        self._done = True
        self._cohort.opened(self, lease)
        del self.acquisition  # breaks a cycle: there is one for each uncontended grant

    def set_exception(self, error: Exception, /) -> None:
        self._done = True
        self._cohort.refused(self, error)

    def withdraw(self) -> None:
        """Undo it: no task needs it any more."""
        self._done = True
        self.acquisition.undo()
