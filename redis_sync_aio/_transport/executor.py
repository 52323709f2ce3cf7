"""The protocols between a coordinator and its executor: what carries calls to the server, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from .._core.keys import Endpoint, Keys
from ..errors import SyncError
from .call import Call
from .dialogues import Dialogue, LocalInbox


class LinkOptions(NamedTuple):
    """Options of a link."""

    response_timeout: float
    """Seconds until a connection counts as dead because a reply is overdue."""
    connect_timeout: float
    """Seconds until an attempt to connect is given up."""
    converse: Callable[[Call, LocalInbox], Dialogue]
    """Starts one attempt at a call where scripts are not allowed."""


class Executor(Protocol):
    """Carries calls to the server. Calls that share a name are executed in the order of ``send``."""

    pushes: bool
    """Whether grants are pushed; if not, waiters poll."""

    @property
    def alone(self) -> bool:
        """Whether no earlier connection can still have unread commands of ours."""
        ...

    @property
    def connections(self) -> int:
        """Number of connections of its own that were opened so far."""
        ...

    @property
    def connection_error(self) -> Exception | None:
        """The reason that there is no connection at the moment; None if there is one, or it is not known."""
        ...

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return the connection error of the server that has ``keys``."""
        ...

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` is known to answer.

        ``stalled`` says that the event loop has not read for a while, so recent silence proves nothing.
        """
        ...

    def endpoint_of(self, keys: Keys) -> Endpoint:
        """Return the endpoint by which the server that has ``keys`` knows us."""
        ...

    def send(self, call: Call) -> None:
        """Send ``call``. Return immediately and never raise; ``call.done`` runs later, never inside."""

    def after_fork(self) -> None:
        """Give up everything in a forked child, without using or closing what belongs to the parent."""

    def close_without_loop(self) -> None:
        """End the connections after the event loop was closed."""

    async def close(self) -> None:
        """Fail all calls in flight and close connections and tasks."""


class LinkOwner(Protocol):
    """Receives what a link reports. All methods are called from the event loop; none of them raises."""

    def link_pushed(self, payload: bytes) -> None:
        """Take a message that was published to the inbox."""

    def link_lost(self, server: str) -> None:
        """Note that the connection to ``server`` was lost."""

    def link_up(self, concerns: Callable[[Keys], bool], server: str, after: float | None) -> None:
        """Check all leases and requests that ``concerns`` selects: there is a new connection, to ``server``.

        ``after``: for how many seconds there was none since one was lost.
        """

    def link_moved(self) -> None:
        """Check which requests have another server now: hash slots have moved."""

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        """Fail the requests that ``concerns`` selects: connecting was refused for good."""

    async def link_closing(self) -> None:
        """Give back what can be given back: the caller closes the client, and the connection is still open."""

    def link_client_closed(self) -> None:
        """Close: the caller has closed the client."""

    def keys_in_use(self) -> Iterable[Keys]:
        """Return the keys of all names that are held or waited for. Read them before any of that changes."""
        ...
