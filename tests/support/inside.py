"""What is inside, for tests that look there: keys, scripts, hubs, links. No other helper knows where it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis_sync_aio import Coordinator
from redis_sync_aio._client.address import BadAddress, parse_address
from redis_sync_aio._client.checkout import CheckedOut, NodeAddress
from redis_sync_aio._client.cluster import Cluster, ClusterNodes, Range, Shard, servers_of
from redis_sync_aio._client.replies import Argument, Reply, ReplyError, Words, pack, refusal
from redis_sync_aio._client.settings import RedisClient
from redis_sync_aio._core import cancellation, clock, logs
from redis_sync_aio._core.cancellation import wait_shielded
from redis_sync_aio._core.clock import now
from redis_sync_aio._core.display import text
from redis_sync_aio._core.keys import (
    INBOX_PREFIX,
    Engine,
    Keys,
    Kind,
    LockKeys,
    PermitKeys,
    gate_keys,
    joined_keys,
    lock_keys,
    mark_keys,
    permit_keys,
    robust_keys,
    turn_key,
)
from redis_sync_aio._core.observing import Attached
from redis_sync_aio._core.redis_py_words import NAMES_OF_OTHERS
from redis_sync_aio._engine.commands import Commands, read_push
from redis_sync_aio._engine.snapshot import (
    Decision,
    LockSnapshot,
    Message,
    Permit,
    PermitSnapshot,
    S,
    Sharer,
    Ticket,
    ticket_member,
)
from redis_sync_aio._engine.watch import converse
from redis_sync_aio._inspection.views import Access, ProblemCode
from redis_sync_aio._leases import hub as hub_module
from redis_sync_aio._leases import implicit, manager, renewals
from redis_sync_aio._leases.cohort import IN_ONE_TURN, Cohort, cohort_of
from redis_sync_aio._leases.grant import Grant
from redis_sync_aio._leases.hold import Acquiring
from redis_sync_aio._leases.hub import Hub, LinkEvents, hubs
from redis_sync_aio._leases.options import HubOptions
from redis_sync_aio._leases.resource import CohortKey, Resource
from redis_sync_aio._leases.settings import LeaseState
from redis_sync_aio._leases.shared_grant import ProcessGrant, TaskGrant
from redis_sync_aio._primitives import majority, parties, quorum, redlock
from redis_sync_aio._primitives.multilock import _groups as lease_groups
from redis_sync_aio._scripts import Script, load
from redis_sync_aio._scripts.constants import (
    ASK_AGAIN,
    BUSY_MS,
    CONTENDED,
    FENCE_RANGE,
    FREE_MS,
    HOUR_MS,
    MAX_NOTIFIED,
    PAUSED_LIMIT,
    POLLERS_TICKET,
    QUEUE_TTL_MS,
    TOMBSTONE_MS,
    WRITER_WEIGHT,
    Outcome,
    Renewed,
    put_in,
)
from redis_sync_aio._transaction import TURN_TTL
from redis_sync_aio._transport import link
from redis_sync_aio._transport.call import Call
from redis_sync_aio._transport.cluster_link import ClusterLink, ShardLink
from redis_sync_aio._transport.connection import Connection
from redis_sync_aio._transport.dialogues import CONFLICT, Dialogue
from redis_sync_aio._transport.link import Link
from redis_sync_aio._transport.outage import ATTEMPT, longest_pause
from redis_sync_aio.embedded import _started as started_servers
from redis_sync_aio.errors._base import copy_error
from redis_sync_aio.errors._misuse import Misuse
from redis_sync_aio.types import Client, GuardingLease


def behind_tickets(lock: Any) -> int:
    """Return how many tasks of this process wait for a lock, or for either side, without a ticket of their own."""
    resource = getattr(lock, "_on", lock)._known()
    cohorts = () if resource is None else resource.cohorts.values()
    return int(sum(max(0, cohort.waiting - len(cohort.pending)) for cohort in cohorts))


TUNED: tuple[str, ...] = "poll_cap", "poll", "burst", "slice"


def tuned(client: Client, **options: Any) -> Coordinator:
    """Return a coordinator that may have other constants than all have: poll_cap, poll, burst, slice (HubOptions)."""
    own = {name: options.pop(name) for name in TUNED if name in options}
    sync = Coordinator(client, **options)
    vars(sync._binding.options).update(own)
    return sync


def hub_of(source: Client | Coordinator) -> Hub:
    """Return the hub of a coordinator, also of a closed one; or the implicit hub of a client in the running loop."""
    if isinstance(source, Coordinator) and source._binding.started is not None:
        return source._binding.started
    return implicit.hub_of(source)


def cohorts_of(resource: Resource) -> Mapping[CohortKey, Cohort]:
    """Return the cohorts of tasks that share what this process holds of a name."""
    return resource.cohorts


def process_grants(sync: Coordinator) -> list[ProcessGrant]:
    """Return what tasks of a coordinator share."""
    return [listener for listener in hub_of(sync).listeners.values() if isinstance(listener, ProcessGrant)]


def read_through(lease: GuardingLease, client: RedisClient) -> None:
    """Let the transactions of ``lease`` use another client."""
    lease._grant.manager.hub.servers = servers_of(client)


def was_used(sync: Coordinator) -> bool:
    """Return whether a coordinator has a hub yet."""
    return sync._binding.started is not None


def link_of(sync: Coordinator) -> Link:
    """Return the link of a coordinator of one server."""
    found = hub_of(sync).link
    assert isinstance(found, Link)
    return found


def cluster_link_of(sync: Coordinator) -> ClusterLink:
    """Return the link of a coordinator of a cluster."""
    found = hub_of(sync).link
    assert isinstance(found, ClusterLink)
    return found


def link_events_of(sync: Coordinator) -> LinkEvents:
    """Return what the link of a coordinator reports to. Set its ``link_pushed`` to hold back or drop what is pushed."""
    return hub_of(sync).link_events


async def close_implicit(source: Client | Hub) -> None:
    """Close an implicit hub, or that of a client in the running loop."""
    hub = source if isinstance(source, Hub) else implicit.hub_of(source)
    await hub.closing.close(0.0)
