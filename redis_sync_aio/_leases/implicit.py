"""The hubs of coordinators and of bare clients: made at the first use, one per client and running event loop.

A hub connects when first used, closes its connection when nothing was held, waited for or asked during `IDLE` seconds,
and otherwise when the event loop ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from .._client.address import OwnedClient
from .._client.settings import Client, RedisClient, encode, is_cluster, running_loop
from .._client.valkey_py import accepted
from .._core.arguments import Name
from .._core.cancellation import wait_shielded
from .._core.keys import Keys, check_slot
from ..errors import CoordinatorClosed
from .hub import Hub, close_orphans, hubs
from .options import HubOptions

# -- The inside of a `Coordinator`: its options and, from its first use on, the hub of one event loop ----------


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
        if (hub := self.started) is None:
            if self.why_closed is not None:
                raise CoordinatorClosed.used(self.why_closed)
            hub = self.started = Hub(self.options, self.owned)
        hub.check()
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


def binding_of(source: object) -> Binding | None:
    """Return the inside of a coordinator; None if ``source`` is not a coordinator."""
    found = getattr(source, "_binding", None)
    return found if isinstance(found, Binding) else None


def client_of(source: Client | CoordinatorLike) -> RedisClient:
    """Return the client to use for what a user gave; raise TypeError unless it is a client or a coordinator."""
    binding = binding_of(source)
    if binding is not None:
        return binding.options.client
    return accepted(source)


K = TypeVar("K", bound=Keys)
MakeKeys: TypeAlias = Callable[[bytes, bytes], K]
"""A function of `_core/keys` that makes the keys of a name, with a prefix."""


def prefix_of(source: Client | CoordinatorLike) -> bytes:
    """Return the prefix of the keys of what a user gave; a client has none."""
    binding = binding_of(source)
    return b"" if binding is None else binding.options.prefix


def label_prefix_of(source: Client | CoordinatorLike) -> bytes:
    """Return the beginning of tokens that the label of a coordinator makes; a client has none."""
    binding = binding_of(source)
    return b"" if binding is None else binding.options.label


def keys_of(source: Client | CoordinatorLike, name: Name, make: MakeKeys[K], what: str = "name") -> K:
    """Return the keys of ``name``, encoded as the client encodes keys, with the prefix of the coordinator.

    Raises TypeError or ValueError for a name that cannot be one; in a cluster also as `check_slot`.
    """
    client, prefix = client_of(source), prefix_of(source)
    wire = encode(client, name, what)
    if is_cluster(client):
        check_slot(wire, prefix)
    return make(wire, prefix)


def hub_of(source: Client | CoordinatorLike) -> Hub:
    """Return the hub of a coordinator, or the implicit one of a client in the running loop.

    Raises WrongContext or CoordinatorClosed if it cannot be used here and now.
    """
    binding = binding_of(source)
    if binding is not None:
        return binding.hub()
    key = id(source), id(running_loop())
    found = hubs.get(key)  # it keeps its client alive, so no other object has that id
    if found is not None:
        found.check()
        return found
    client = accepted(source)
    if client is not source:
        return hub_of(client)
    close_orphans()
    found = hubs[key] = Hub(HubOptions(client))
    found.closing.look_later()
    return found
