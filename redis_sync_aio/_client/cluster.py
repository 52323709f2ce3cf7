"""Redis Cluster: which shard has which hash slots, and a client for each shard.

A shard is a primary and its replicas. The layers above see it as one server with a client of its own, whose connections
lead to the node that is the primary when they are opened. So a failover looks as it does with Sentinel: the connection
is lost, and the next one leads to another server.

Any node can say which primary has which slots (CLUSTER SLOTS). We ask when a connection is opened, and when a node
answers that a slot is not its own. The caller's client provides the options of connections, the first nodes, and
``address_remap``. Its own table of slots is left alone, because each refresh of that table closes connections of the
caller.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from .._core.clock import now
from .._core.display import listed
from .cluster_nodes import ClusterNodes, Range, connection_options, not_now
from .primary_pool import Address, SlotPool
from .redis_py import close_idle, on_close, owner_of

FRESH = 0.1
"""Seconds for which an answer is reused: after a failover, several shards open connections at the same time."""
NEVER = float("-inf")


class SlotMoved(redis.exceptions.TryAgainError):
    """A slot has another shard than the known one; the next connection leads there.

    Attributes:
        slot: the slot; -1 if it is not known.
    """

    slot = -1


class Subscriber(Protocol):
    """Receives changes of a cluster."""

    def slots_moved(self) -> None:
        """Adapt to slots that have another shard now, or shards that have another primary.

        Called in the thread that received the answer.
        """


class Shard:
    """A primary and its replicas."""

    def __init__(self, cluster: Cluster, number: int, options: dict[str, Any]) -> None:
        self.cluster = cluster
        self.number = number
        self.address: Address | None = None  # of the primary; None until a node has answered
        self.client = Redis(connection_pool=ConnectionPool(shard=self, **options))
        self.gone = False
        """Whether it has lost all its slots. Then it is never used again."""
        self.connecting: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}
        """Timeouts of attempts to connect to that address. They may hang, so a new address ends them."""

    def lead_to(self, primary: Address) -> None:
        """Lead to another primary from now on. Called in the thread that received the answer."""
        self.address = primary
        for limit, loop in list(self.connecting.items()):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end_attempt, limit)

    def _end_attempt(self, limit: asyncio.Timeout) -> None:
        if limit in self.connecting and not limit.expired():
            limit.reschedule(0)

    def redirection(self, answer: redis.exceptions.AskError) -> redis.exceptions.TryAgainError:
        """Return the error to raise for ``answer``, MOVED or ASK, of the primary."""
        if not isinstance(answer, redis.exceptions.MovedError):
            return redis.exceptions.TryAgainError(not_now("ASK", answer.slot_id, f"{answer.host}:{answer.port}"))
        error = SlotMoved(not_now("MOVED", answer.slot_id, f"{answer.host}:{answer.port}"))
        error.slot = answer.slot_id
        if self.cluster.shard_at(answer.slot_id) is self:  # else the key was sent to the wrong shard
            self.cluster.moved(f"{answer.host}:{answer.port}")
        return error

    def down(self, node: Address) -> None:
        """Note that ``node`` said that the cluster is down."""
        self.cluster.down(node)

    def unreachable(self, node: Address) -> None:
        """Ask all other nodes before ``node``, to which there is no connection."""
        self.cluster.nodes.ask_last(node)

    async def locate(self) -> Address:
        """Ask the nodes and return the address of the primary; raise as redis-py does when no node can be reached."""
        await self.cluster.refresh()
        assert self.address is not None
        return self.address


class Cluster:
    """The shards behind a `RedisCluster`."""

    def __init__(self, client: RedisCluster) -> None:
        options = connection_options(client)
        self.nodes = ClusterNodes(client, options)
        """The nodes that are asked, and reached directly."""
        self._applied: list[Range] | None = None
        self._refreshed = NEVER  # local clock, from before the nodes were asked; NEVER while there is a doubt
        self._applied_at = NEVER  # the same for the newest answer, also while there is a doubt
        self._lock = threading.Lock()  # a client may be used in several threads, each with an event loop
        self._doubts = 0  # number of reports that the known slots are wrong
        # Until a node has answered, this shard has all slots; after that it is one of the shards.
        self._options = options
        self._numbers = itertools.count()
        self.shards = [Shard(self, next(self._numbers), self._options)]
        self._owners = self.shards * REDIS_CLUSTER_HASH_SLOTS
        self._by_slot: WeakValueDictionary[int, Redis] = WeakValueDictionary()
        self._subscribers: WeakSet[Subscriber] = WeakSet()
        on_close(client, self, Cluster._close)

    @staticmethod
    def of(client: RedisCluster) -> Cluster:
        """Return the cluster of ``client``, which keeps it (`on_close`): our connections lead back to the client."""
        owner = owner_of(client)
        return owner if isinstance(owner, Cluster) else Cluster(client)

    async def _close(self) -> None:
        """Close the connections to all shards: the caller closes the client."""
        for opened in self.clients():
            await opened.connection_pool.disconnect()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` on changes, as long as it lives."""
        with self._lock:
            self._subscribers.add(subscriber)

    def shard_at(self, slot: int) -> Shard:
        """Return the shard that has ``slot``, as far as is known."""
        return self._owners[slot]

    def client_of(self, *keys: bytes) -> Redis:
        """Return a client whose connections lead to the present primary of the shard that has ``keys``.

        Raise ValueError when the keys are in several slots.
        """
        slot, *others = {key_slot(key) for key in keys}
        if others:
            raise ValueError(
                f"{listed(keys)} are in several hash slots of the cluster, so one command cannot use them together: "
                "give the names a common hash tag, {like}:this and {like}:that"
            )
        client = self._by_slot.get(slot)
        if client is None:
            pool = SlotPool(self, slot, self._options)
            client = self._by_slot[slot] = Redis(connection_pool=pool)
        return client

    def clients(self) -> list[Redis]:
        """Return the client of each known shard."""
        return [shard.client for shard in self.shards]

    def key_of_each(self) -> list[bytes]:
        """Return a key of each known shard."""
        owners, found = list(self._owners), dict[Shard, bytes]()
        shards, numbers = len(set(owners)), itertools.count()
        while len(found) < shards:
            key = b"%d" % next(numbers)
            found.setdefault(owners[key_slot(key)], key)
        return list(found.values())

    def address_at(self, key: bytes) -> str:
        """Return the address of the shard that has ``key``, as far as is known."""
        host, port = self._owners[key_slot(key)].address or ("", 0)
        return f"{host}:{port}"

    async def owner(self, slot: int) -> Shard:
        """Return the shard that has ``slot``; ask the nodes if that is not known, or was wrong."""
        if self._refreshed == NEVER:
            await self.refresh()
        return self._owners[slot]

    def moved(self, address: str) -> None:
        """Note that a slot has moved, perhaps to ``address`` ("host:port"), so the known slots are wrong."""
        self._refreshed = NEVER
        self._doubts += 1
        self.nodes.ask_first(address)

    def down(self, node: Address | None) -> None:
        """Note that ``node`` said that the cluster is down; ask other nodes first.

        The node may be cut off from them, and another one may be the primary now.
        """
        self._refreshed = NEVER
        self._doubts += 1
        if node is not None:
            self.nodes.ask_last(node)

    async def refresh(self) -> None:
        """Ask the nodes which shard has which slots, until one answers; raise as redis-py does when none does."""
        begun, doubts = now(), self._doubts
        if begun - self._refreshed < FRESH:
            return
        ranges = await self.nodes.slot_ranges()
        with self._lock:
            gone: list[Shard] = []
            if begun > self._applied_at:  # else a newer answer was applied meanwhile
                self._applied_at = begun
                gone = self._apply(ranges)
        for shard in gone:
            await close_idle(shard.client)
        if doubts == self._doubts:  # else the answer may be older than the latest report
            self._refreshed = begun

    def _apply(self, ranges: list[Range]) -> list[Shard]:
        """Let the shards have these ranges from now on; return those that have lost all their slots."""
        if ranges is self._applied:
            return []
        self._applied = ranges
        self.nodes.update(ranges)
        owners, addresses = list(self._owners), [shard.address for shard in self.shards]
        starts: dict[Address, int] = {}
        for first, _, (primary, *_) in ranges:
            starts.setdefault(primary, first)
        found = {shard.address: shard for shard in self.shards}
        shards = {
            primary: found.get(primary) or self._shard(primary, first, starts) for primary, first in starts.items()
        }
        for first, last, (primary, *_) in ranges:
            self._owners[first : last + 1] = [shards[primary]] * (last + 1 - first)
        left = set(self._owners)
        gone = [shard for shard in self.shards if shard not in left]
        self.shards = [shard for shard in self.shards if shard in left]
        for shard in gone:
            shard.gone = True
        if self._owners != owners or [shard.address for shard in self.shards] != addresses:
            for subscriber in list(self._subscribers):
                subscriber.slots_moved()
        return gone

    def _shard(self, primary: Address, slot: int, primaries: dict[Address, int]) -> Shard:
        """Return the shard of a new primary, which has ``slot`` now."""
        shard = self._owners[slot]
        if shard.address in primaries:
            shard = Shard(self, next(self._numbers), self._options)
            self.shards.append(shard)
        # Else the shard that had the slot has lost its primary: one of its replicas was promoted.
        shard.lead_to(primary)
        return shard
