"""Redis Cluster: which of its shards has which hash slots, and a client for each of them.

A shard is a primary and its replicas. For all that is above, it is one server with a client of its own, whose
connections lead to whoever is the primary when they are opened. So a failover looks as it does with Sentinel: the
connection is lost, and the next one leads to another server.

Who is the primary of what is asked of any node (CLUSTER SLOTS), each time a connection is opened, and when a node
answers that a slot is not its own. From the caller's client we have how to connect, the nodes to begin with, and
``address_remap``. Its own table of slots is left alone: each refresh of that closes connections of the caller.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary, ref

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from .._core.clock import now
from .._core.display import listed
from .primary_pool import Address, SlotPool, following
from .redis_py import bared, close_idle, on_close, opening, owner_of, write
from .resp import pack

FRESH = 0.1
"""Seconds for which an answer of the nodes is good for opening connections: several shards do so at the same time."""
PATIENCE = 2.0
"""Seconds in which a node has to answer, before another one is asked."""

AT_ONCE = 250
"""So many ranges of an answer are read in one turn of the loop."""

NEVER = float("-inf")

TIES = ("redis_connect_func", "oss_cluster_maint_notifications_handler", "himport_registry")
"""Options by which a cluster client ties its connections to itself."""
NOT_FOR_CONNECTIONS = ("connection_class", "response_callbacks", "retry")
"""Options of the same dictionary that are for others, or that we choose."""


class Range(NamedTuple):
    """Some slots, and the nodes that have them; the first is the primary."""

    first: int
    last: int
    nodes: list[Address]


class SlotMoved(redis.exceptions.TryAgainError):
    """A slot is not where we thought; the next connection leads to where it is.

    Attributes:
        slot: which.
    """

    slot = -1


def not_now(answer: str, slot: str | int, node: str) -> str:
    """Return what the error answers MOVED and ASK mean for us."""
    state = "has moved" if answer == "MOVED" else "is being moved"
    return f"slot {slot} {state} to {node or 'another node'} ({answer})"


_ASK = re.compile(r"^ASK \d+ (.+):(\d+)$|is being moved to (.+):(\d+) \(ASK\)")


class Member(Protocol):
    """Who wants to know of changes."""

    def slots_moved(self) -> None:
        """Some slots have other shards now, or shards other primaries."""


class Shard:
    """A primary and its replicas."""

    def __init__(self, cluster: Cluster, number: int, options: dict[str, Any]) -> None:
        self.cluster = cluster
        self.number = number
        self.address: Address | None = None  # of the primary; None before any node was asked
        self.client = Redis(connection_pool=ConnectionPool(shard=self, **options))
        self.gone = False
        """It has no slots any more, and is never used again."""
        self.connecting: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}
        """What opens connections to that address, which may hang: another address makes an end of it."""

    def lead_to(self, primary: Address) -> None:
        """Its primary is another one now; said in whatever thread that was heard in."""
        self.address = primary
        for limit, loop in list(self.connecting.items()):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, limit)

    def _end(self, limit: asyncio.Timeout) -> None:
        if limit in self.connecting and not limit.expired():
            limit.reschedule(0)

    def elsewhere(self, answer: redis.exceptions.AskError) -> redis.exceptions.TryAgainError:
        """Return the error for such an answer of its primary."""
        if not isinstance(answer, redis.exceptions.MovedError):
            return redis.exceptions.TryAgainError(not_now("ASK", answer.slot_id, f"{answer.host}:{answer.port}"))
        error = SlotMoved(not_now("MOVED", answer.slot_id, f"{answer.host}:{answer.port}"))
        error.slot = answer.slot_id
        if self.cluster.shard_at(answer.slot_id) is self:  # else it is of a key that should not have been sent here
            self.cluster.moved(f"{answer.host}:{answer.port}")
        return error

    def down(self, node: Address) -> None:
        """Note that ``node`` said that the cluster is down."""
        self.cluster.down(node)

    async def locate(self) -> Address:
        """Return where its primary is, as a node says now. Raises as redis-py does when none can be reached."""
        await self.cluster.refresh()
        assert self.address is not None
        return self.address


class Cluster:
    """The shards behind a `RedisCluster`."""

    def __init__(self, client: RedisCluster) -> None:
        self._client = ref(client)
        self._nodes: list[Address] = []  # in the order in which they are asked
        self._told: Address | None = None  # by the latest MOVED, and not asked yet
        self._failed: dict[Address, float] = {}  # when they did (local clock)
        # The original ones may be a name that always leads to the cluster: the manager forgets them.
        seeds = getattr(client, "startup_nodes", None) or client.nodes_manager.startup_nodes.values()
        self._seeds = [Address(node.host, int(node.port)) for node in seeds]
        self._answer: tuple[Address, Any, list[Range]] | None = None  # the latest: of which node, and what it means
        self._learnt: list[Range] | None = None
        self._looked = NEVER  # local clock, from before the nodes were asked
        self._learned = NEVER  # the same, of the newest answer, true or not
        self._learning = threading.Lock()  # a client may be used in several threads, with an event loop each
        self._doubts = 0  # how often somebody said that it is not true any more
        kind: Any = client.connection_kwargs["connection_class"]
        left_out = {*TIES, *NOT_FOR_CONNECTIONS}
        self._options = {key: value for key, value in client.connection_kwargs.items() if key not in left_out}
        self._options |= {"connection_class": following(kind), "retry": Retry(NoBackoff(), 0)}
        # All slots are its own until a node was asked; then it is one of the shards.
        self._numbers = itertools.count()
        self.shards = [Shard(self, next(self._numbers), self._options)]
        self._owners = self.shards * REDIS_CLUSTER_HASH_SLOTS
        self._by_slot: WeakValueDictionary[int, Redis] = WeakValueDictionary()
        self._members: WeakSet[Member] = WeakSet()
        on_close(client, self, Cluster._close)

    @staticmethod
    def of(client: RedisCluster) -> Cluster:
        """Return that of ``client``, which keeps it by its ``aclose``: connections of ours lead back to the client."""
        owner = owner_of(client)
        return owner if isinstance(owner, Cluster) else Cluster(client)

    async def _close(self) -> None:
        """Close the connections to all shards: the caller closes the client."""
        for opened in self.clients():
            await opened.connection_pool.disconnect()

    def subscribe(self, member: Member) -> None:
        """Tell ``member`` of changes, as long as it lives."""
        with self._learning:
            self._members.add(member)

    def shard_at(self, slot: int) -> Shard:
        """Return who has ``slot``, as far as is known."""
        return self._owners[slot]

    def client_of(self, *keys: bytes) -> Redis:
        """Return a client whose connections lead to the present primary of the shard that has ``keys``.

        Raises ValueError when those are in several slots.
        """
        slot, *others = {key_slot(key) for key in keys}
        if others:
            raise ValueError(
                f"{listed(keys)} are in several hash slots of the cluster, and "
                "nothing can be done to them together: give the names a common hash tag, {like}:this and {like}:that"
            )
        client = self._by_slot.get(slot)
        if client is None:
            pool = SlotPool(self, slot, self._options)
            client = self._by_slot[slot] = Redis(connection_pool=pool)
        return client

    def clients(self) -> list[Redis]:
        """Return the client of each shard that is known."""
        return [shard.client for shard in self.shards]

    async def owner(self, slot: int) -> Shard:
        """Return who has ``slot``; ask the nodes if that is not known, or was wrong."""
        if self._looked == NEVER:
            await self.refresh()
        return self._owners[slot]

    def moved(self, address: str) -> None:
        """A node said that what we know is not true any more, and perhaps where the slot is now ("host:port")."""
        self._looked = NEVER
        self._doubts += 1
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            self._told = Address(host, int(port))  # it is likely to know; not remapped here: that may raise anything

    def asked(self, answer: str) -> Address | None:
        """Return the node that an ASK names, as the server says it or `not_now`; None for other answers."""
        found = _ASK.search(answer)
        return self._remapped(found[1] or found[3], int(found[2] or found[4])) if found else None

    def down(self, node: Address | None) -> None:
        """``node`` said that the cluster is down. It may be cut off, and not the primary any more: ask others first."""
        self._looked = NEVER
        self._doubts += 1
        if node is not None:
            self._failed[node] = now()

    async def refresh(self) -> None:
        """Ask the nodes who has which slots, until one answers. Raises as redis-py does when none does."""
        begun, doubts = now(), self._doubts
        if begun - self._looked < FRESH:
            return
        failed: Exception | None = None
        refused: Exception | None = None
        told, self._told = self._told, None
        if told is not None:
            self._nodes = [self._remapped(*told), *self._nodes]
        candidates = self._candidates()
        for node in candidates:
            self._failed[node] = now()  # now already: if it hangs, there may be no time left to note that
            try:
                async with asyncio.timeout(PATIENCE):
                    ranges = await self._ask(node)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError, TimeoutError) as error:
                failed = error
                if isinstance(error, redis.exceptions.AuthenticationError):
                    refused = error
                continue
            except redis.exceptions.ResponseError as error:
                refused = error  # of this node; others may have other users
                continue
            if not ranges:  # it was reset, or does not belong to the cluster yet
                failed = redis.exceptions.ConnectionError(f"{node.host}:{node.port} knows of no slots")
                continue
            self._failed.pop(node, None)
            with self._learning:
                gone = []
                if begun > self._learned:  # else there is a newer answer
                    self._learned = begun
                    gone = self._learn(ranges)
            for shard in gone:
                await close_idle(shard.client)
            if doubts == self._doubts:  # else the answer may be older than those
                self._looked = begun
            return
        if refused is not None:
            raise refused
        raise redis.exceptions.ConnectionError(
            f"none of {len(candidates)} nodes of the cluster answers, the last one: {failed}"
        ) from failed

    def _candidates(self) -> list[Address]:
        """Return whom to ask, each time another one first: what one says may be old.

        Last the original seeds, and those that failed lately.
        """
        client = self._client()
        startup = [] if client is None else client.nodes_manager.startup_nodes.values()
        known = list(dict.fromkeys((*self._nodes, *(Address(node.host, int(node.port)) for node in startup))))
        self._nodes = [*known[1:], known[0]]
        known += [seed for seed in self._seeds if seed not in known]
        self._failed = {node: failed for node, failed in list(self._failed.items()) if node in known}
        return sorted(known, key=lambda node: self._failed.get(node, 0.0))

    async def _ask(self, node: Address) -> list[Range]:
        """Return who has which slots, as ``node`` knows it."""
        async with self.connected(node) as connection:
            write(connection, pack((b"CLUSTER", b"SLOTS")))
            answer = await connection.read_response(disable_decoding=True, timeout=float("inf"))
        return await self._read(node, answer)

    async def _read(self, node: Address, answer: Any) -> list[Range]:
        """Return what the answer of ``node`` means: the same object if it answers as before."""
        if self._answer is not None:
            source, before, ranges = self._answer
            # A node may not know what others call it: then the same answer of another one means something else.
            if before == answer and (source == node or all(_host(host) for _, _, *told in before for host, *_ in told)):
                return ranges
        addresses: dict[tuple[bytes | None, int], Address] = {}
        ranges = []
        for first, last, *nodes in answer:
            for host, port, *_ in nodes:
                if (host, port) not in addresses:
                    addresses[host, port] = self._remapped(_host(host) or node.host, port)
            ranges.append(Range(first, last, [addresses[host, port] for host, port, *_ in nodes]))
            if len(ranges) % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._answer = node, answer, ranges
        return ranges

    @asynccontextmanager
    async def connected(self, node: Address) -> AsyncIterator[Any]:
        """Have a connection of redis-py's to ``node``, whatever that is; raises as redis-py."""
        options = self._options | {"shard": None, "host": node.host, "port": node.port}
        pool: Any = ConnectionPool(**options)
        connection = pool.make_connection()
        try:
            with opening(connection):
                await bared(connection.connect())
            yield connection
        finally:
            await connection.disconnect(nowait=True)

    def _remapped(self, host: str, port: int) -> Address:
        client = self._client()
        return Address(host, port) if client is None else Address(*client.nodes_manager.remap_host_port(host, port))

    def _learn(self, ranges: list[Range]) -> list[Shard]:
        """Know who has which slots from now on; return the shards that have none any more."""
        if ranges is self._learnt:
            return []
        self._learnt = ranges
        told = dict.fromkeys(node for it in ranges for node in it.nodes)
        known = set(self._nodes)
        self._nodes = [*(node for node in self._nodes if node in told), *(it for it in told if it not in known)]
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
            for member in list(self._members):
                member.slots_moved()
        return gone

    def _shard(self, primary: Address, slot: int, primaries: dict[Address, int]) -> Shard:
        """Return the shard of a new primary that has ``slot``."""
        shard = self._owners[slot]
        if shard.address in primaries:
            shard = Shard(self, next(self._numbers), self._options)
            self.shards.append(shard)
        # Else what had the slot is no primary any more: a replica of its was promoted.
        shard.lead_to(primary)
        return shard


def _host(told: bytes | None) -> str:
    return "" if told in (None, b"?") else told.decode()
