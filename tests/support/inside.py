"""What coordinators are inside, for tests that look there: no other helper or test knows where that is."""

from __future__ import annotations

from redis_sync_aio import Coordinator
from redis_sync_aio._acquire import implicit
from redis_sync_aio._acquire.hub import Hub
from redis_sync_aio._acquire.link_events import LinkEvents
from redis_sync_aio._acquire.options import hub_options
from redis_sync_aio._acquire.resource import Resource
from redis_sync_aio._sharing.cohort import Cohort
from redis_sync_aio._sharing.cohorts import Cohorts, cohort_of
from redis_sync_aio._sharing.shared_grant import ProcessGrant
from redis_sync_aio._transport.cluster_link import ClusterLink
from redis_sync_aio._transport.link import Link
from redis_sync_aio.types import Client

__all__ = [
    "LinkEvents",
    "close_implicit",
    "cluster_link_of",
    "cohort_of",
    "cohorts_of",
    "hub_of",
    "hub_options",
    "implicit",
    "link_events_of",
    "link_of",
    "process_grants",
    "was_used",
]


def hub_of(source: Client | Coordinator) -> Hub:
    """Return the hub of a coordinator, also of a closed one; or the implicit hub of a client in the running loop."""
    if isinstance(source, Coordinator) and source._binding.started is not None:
        return source._binding.started
    return implicit.hub_of(source)


def cohorts_of(resource: Resource) -> dict[tuple[int, int], Cohort]:
    """Return the cohorts of tasks that share what this process holds of a name, by weight and limit."""
    if resource.sharing is None:
        return {}
    assert isinstance(resource.sharing, Cohorts)
    return resource.sharing.all


def process_grants(sync: Coordinator) -> list[ProcessGrant]:
    """Return what tasks of a coordinator share."""
    return [listener for listener in hub_of(sync).listeners.values() if isinstance(listener, ProcessGrant)]


def was_used(sync: Coordinator) -> bool:
    """Return whether a coordinator has a hub yet."""
    return sync._binding.started is not None


def link_of(sync: Coordinator) -> Link:
    """Return the link of a coordinator of one server."""
    link = hub_of(sync).link
    assert isinstance(link, Link)
    return link


def cluster_link_of(sync: Coordinator) -> ClusterLink:
    """Return the link of a coordinator of a cluster."""
    link = hub_of(sync).link
    assert isinstance(link, ClusterLink)
    return link


def link_events_of(sync: Coordinator) -> LinkEvents:
    """Return what the link of a coordinator reports to. Set its ``link_pushed`` to hold back or drop what is pushed."""
    return hub_of(sync).link_events


async def close_implicit(source: Client | Hub) -> None:
    """Close an implicit hub, or that of a client in the running loop."""
    hub = source if isinstance(source, Hub) else implicit.hub_of(source)
    await hub.closing.close(0.0)
