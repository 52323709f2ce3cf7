"""The inside of a `Coordinator`: its options and, from its first use on, the hub of one event loop."""

from __future__ import annotations

from typing import Protocol

from .._client.owned import OwnedClient
from .._core.cancellation import wait_shielded
from ..errors import CoordinatorClosed
from .hub import Hub
from .options import HubOptions


class Binding:
    """The hub of a coordinator. The first use binds it to the running event loop."""

    def __init__(self, options: HubOptions) -> None:
        self.options = options
        self.owned: OwnedClient | None = None
        """The client, if it is closed with the coordinator."""
        self.started: Hub | None = None
        """The hub; None before the first use."""
        self._closed_unused = False

    @property
    def why_closed(self) -> str | None:
        """The reason that it cannot be used any more; None while it can."""
        if self.started is not None:
            return self.started.why_closed
        return "it was closed" if self._closed_unused else None

    def hub(self) -> Hub:
        """Return the hub. Raises WrongContext or CoordinatorClosed unless it may be used here and now."""
        hub = self.started
        if hub is not None:
            hub.check()
            return hub
        if self.why_closed is not None:
            raise CoordinatorClosed.used(self.why_closed)
        hub = self.started = Hub(self.options, self.owned)
        return hub

    async def close(self, drain: float) -> None:
        """Close the hub, as `Coordinator.aclose`; the first use is refused from now on if there was none."""
        if self.started is not None:
            await self.started.closing.close(drain)
            return
        self._closed_unused = True
        if self.owned is not None:  # it may have been used for other commands
            await wait_shielded(self.owned.start_closing())


class CoordinatorLike(Protocol):
    """A `Coordinator`, as the primitives know it."""

    _binding: Binding
