"""The protocols that an acquisition relies on: the name that it is for, and the hub of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from .._client.resp import Argument
from .._core.keys import Endpoint, Keys
from .._leases.grant import Grant
from .._leases.manager import GrantManager
from .._transport.call import Call
from .identities import IdentityRequests
from .queued import QueuedTickets
from .request import Request
from .waits import WaitedHub, WaitedName

A_contra = TypeVar("A_contra", contravariant=True)


class AcquiringHub(WaitedHub, Protocol):
    """The hub, as acquisitions know it."""

    manager: GrantManager
    queued_tickets: QueuedTickets
    pushes: bool
    poll_ms: int
    claim_ms: int

    def connection_error_of(self, keys: Keys) -> Exception | None: ...
    def next_number(self) -> int: ...


class Owner(WaitedName, Protocol[A_contra]):
    """The name that acquisitions are for, as they know it."""

    endpoint: Endpoint
    identities: IdentityRequests | None

    @property
    def hub(self) -> AcquiringHub: ...
    def add(self, acquisition: A_contra) -> None: ...
    def remove(self, number: int) -> None: ...
    def by_identity(self) -> IdentityRequests: ...
    def busy(self, left: float | None) -> None: ...
    def queued(self, left: float | None, look: int) -> None: ...
    def queue_lost(self) -> None: ...
    def announced(self, until: float) -> None: ...
    def look_last(self, then: Callable[[], None], *, name_holders: bool = True) -> None: ...
    def hold(self, request: Request, token: bytes, fence: int, deadline: float, period: float) -> Grant: ...
    def decline(self, lease: Grant) -> None: ...
    def undo(
        self,
        token: bytes,
        ticket: bytes,
        *,
        pending: bool = False,
        release_args: tuple[Argument, ...] = (),
        done: Callable[[Call], None] | None = None,
    ) -> None: ...
