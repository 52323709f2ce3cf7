"""The servers behind a client: one server, or the shards of a Redis Cluster, with a client for each.

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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod, WeakValueDictionary, ref

import redis.exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from .._core.clock import now
from .._core.display import listed
from .checkout import NodeAddress, SlotPool, following
from .redis_py import bared, close_idle, on_close, opening, owner_of, write
from .replies import pack
from .settings import RedisClient, address_of

# -- The nodes of a cluster: which one to ask which shard has which hash slots, and its answer -----------------


NODE_TIMEOUT = 2.0
"""Seconds that a node has to answer before another node is asked."""

RANGES_PER_TURN = 250
"""Ranges of an answer that are read in one turn of the event loop."""

CLIENT_OPTIONS = ("redis_connect_func", "oss_cluster_maint_notifications_handler", "himport_registry")
"""Options that tie a connection to the cluster client that opens it."""
REPLACED_OPTIONS = ("connection_class", "response_callbacks", "retry")
"""Options in the same dictionary that are not for connections, or that this module sets itself."""


class Range(NamedTuple):
    """A range of slots and the nodes that have them, the primary first."""

    first: int
    last: int
    nodes: list[NodeAddress]


Addresses: TypeAlias = dict[tuple[bytes | None, int], NodeAddress]
"""Where the nodes are reached, by host and port as a node names them."""


def not_now(answer: str, slot: str | int, node: str) -> str:
    """Return the message that stands for the error replies MOVED and ASK: retry later."""
    state = "has moved" if answer == "MOVED" else "is being moved"
    return f"slot {slot} {state} to {node or 'another node'} ({answer})"


def connection_options(client: RedisCluster) -> dict[str, Any]:
    """Return the options of connections and pools that are like those of ``client``, and follow primaries."""
    left_out = {*CLIENT_OPTIONS, *REPLACED_OPTIONS}
    options = {key: value for key, value in client.connection_kwargs.items() if key not in left_out}
    kind: Any = client.connection_kwargs["connection_class"]
    return options | {"connection_class": following(kind), "retry": Retry(NoBackoff(), 0)}


class ClusterNodes:
    """The nodes of one cluster, in the order in which they are asked."""

    def __init__(self, client: RedisCluster, options: dict[str, Any]) -> None:
        self._client = ref(client)
        self._options = options
        self._nodes: list[NodeAddress] = []  # in the order in which they are asked
        self._hint: NodeAddress | None = None  # the node that the latest MOVED named, until it is asked
        self._failed: dict[NodeAddress, float] = {}  # local clock
        # The first nodes may be a name that always leads to the cluster; the client's manager forgets them, and so does
        # the client before redis-py 7.0.
        seeds = getattr(client, "startup_nodes", None) or client.nodes_manager.startup_nodes.values()
        self._seeds = [NodeAddress(node.host, int(node.port)) for node in seeds]
        self.seeds: str = ", ".join(f"{host}:{port}" for host, port in self._seeds[:3])
        """The addresses that the client was made with, for messages; at most three."""
        self._answer: tuple[Any, Addresses, list[Range]] | None = None  # the latest reply, and its meaning

    def ask_first(self, address: str) -> None:
        """Ask the node at ``address`` ("host:port") before all others next time, as it is likely to know."""
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            self._hint = NodeAddress(host, int(port))  # remapped later, as that may raise anything

    def ask_next(self, node: NodeAddress) -> None:
        """Ask ``node`` before all others next time: slots have left it, and it knows who has them."""
        self._nodes = [node, *self._nodes]
        self._failed.pop(node, None)

    def ask_last(self, node: NodeAddress) -> None:
        """Ask all other nodes before ``node`` next time."""
        self._failed[node] = now()

    def update(self, ranges: list[Range]) -> None:
        """Keep the nodes that are in ``ranges``, in their order, and add new ones."""
        named = dict.fromkeys(node for it in ranges for node in it.nodes)
        known = set(self._nodes)
        self._nodes = [*(node for node in self._nodes if node in named), *(it for it in named if it not in known)]

    async def slot_ranges(self) -> list[Range]:
        """Ask node after node, and return the first useful answer; raise as redis-py does when there is none."""
        failure: Exception | None = None
        refusal: Exception | None = None
        hint, self._hint = self._hint, None
        if hint is not None:
            self._nodes = [self._remapped(*hint), *self._nodes]
        candidates = self._candidates()
        for node in candidates:
            self._failed[node] = now()  # noted in advance: if the node hangs, there may be no time left for it
            try:
                async with asyncio.timeout(NODE_TIMEOUT):
                    ranges = await self.ask(node)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError, TimeoutError) as error:
                failure = error
                if isinstance(error, redis.exceptions.AuthenticationError):
                    refusal = error
            except redis.exceptions.ResponseError as error:
                refusal = error  # of this node; other nodes may have other users
            else:
                if ranges:
                    self._failed.pop(node, None)
                    return ranges
                # The node was reset, or does not belong to the cluster yet.
                failure = redis.exceptions.ConnectionError(f"{node.host}:{node.port} knows of no slots")
        if refusal is not None:
            raise refusal
        raise redis.exceptions.ConnectionError(
            f"none of {len(candidates)} nodes of the cluster answers; the last one: {failure}"
        ) from failure

    def _candidates(self) -> list[NodeAddress]:
        """Return the nodes in the order in which to ask them.

        Each time another node is the first, since one node's answer may be old. The seeds, and nodes that failed
        lately, are the last.
        """
        client = self._client()
        startup = [] if client is None else client.nodes_manager.startup_nodes.values()
        known = list(dict.fromkeys((*self._nodes, *(NodeAddress(node.host, int(node.port)) for node in startup))))
        self._nodes = [*known[1:], known[0]]
        # All of these may be what ``address_remap`` returned before: the nodes' own names are put through it again.
        named = () if self._answer is None else self._answer[1]
        again = [self._remapped(own, port) for host, port in named if (own := _host(host))]
        known += [node for node in (*self._seeds, *again) if node not in known]
        self._failed = {node: failed for node, failed in list(self._failed.items()) if node in known}
        return sorted(known, key=lambda node: self._failed.get(node, 0.0))

    async def ask(self, node: NodeAddress) -> list[Range]:
        """Return the ranges of slots as ``node`` knows them."""
        pool: Any = ConnectionPool(**self._options | {"shard": None, "host": node.host, "port": node.port})
        connection = pool.make_connection()
        try:
            with opening(connection):
                await bared(connection.connect())
            write(connection, pack((b"CLUSTER", b"SLOTS")))
            answer = await connection.read_response(disable_decoding=True, timeout=float("inf"))
        finally:
            await connection.disconnect(nowait=True)
        return await self._read(node, answer)

    async def _read(self, node: NodeAddress, answer: Any) -> list[Range]:
        """Return the ranges in the answer of ``node``: the same object if it means the same as before."""
        if self._answer is not None:
            before, addresses, ranges = self._answer
            # The same answer means something else when ``address_remap`` has other results, and when another node gives
            # it that does not know its own address.
            known = addresses.items()
            if before == answer and all(to == self._remapped(_host(it[0]) or node.host, it[1]) for it, to in known):
                return ranges
        addresses = {}
        ranges = []
        for first, last, *nodes in answer:
            for host, port, *_ in nodes:
                if (host, port) not in addresses:
                    addresses[host, port] = self._remapped(_host(host) or node.host, port)
            ranges.append(Range(first, last, [addresses[host, port] for host, port, *_ in nodes]))
            if len(ranges) % RANGES_PER_TURN == 0:
                await asyncio.sleep(0)
        self._answer = answer, addresses, ranges
        return ranges

    def _remapped(self, host: str, port: int) -> NodeAddress:
        client = self._client()
        return (
            NodeAddress(host, port)
            if client is None
            else NodeAddress(*client.nodes_manager.remap_host_port(host, port))
        )


def _host(named: bytes | None) -> str:
    return "" if named in (None, b"?") else named.decode()


FRESH = 0.1
"""Seconds for which an answer is reused: after a failover, several shards open connections at the same time."""
NEVER = float("-inf")


class SlotMoved(redis.exceptions.TryAgainError):
    """A slot has another shard than the known one; the next connection leads there.

    Attributes:
        slot: the slot; -1 if it is not known.
    """

    slot = -1


class Shard:
    """A primary and its replicas."""

    def __init__(self, cluster: Cluster, number: int, options: dict[str, Any]) -> None:
        self.cluster = cluster
        self.number = number
        self.address: NodeAddress | None = None  # of the primary; None until a node has answered
        self.client: Redis = Redis(connection_pool=ConnectionPool(shard=self, **options))
        self.gone = False
        """True if it has lost all its slots. Then it is never used again."""
        self.connecting: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}
        """Timeouts of attempts to connect to that address. They may hang, so a new address ends them."""

    def lead_to(self, primary: NodeAddress) -> None:
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

    def down(self, node: NodeAddress) -> None:
        """Note that ``node`` said that the cluster is down."""
        self.cluster.down(node)

    def unreachable(self, node: NodeAddress) -> None:
        """Ask all other nodes before ``node``, to which there is no connection."""
        self.cluster.nodes.ask_last(node)

    async def locate(self) -> NodeAddress:
        """Ask the nodes and return the address of the primary; raise as redis-py does when no node can be reached."""
        await self.cluster.refresh()
        assert self.address is not None
        return self.address


class Cluster:
    """The shards behind a `RedisCluster`."""

    def __init__(self, client: RedisCluster) -> None:
        options = connection_options(client)
        self.nodes: ClusterNodes = ClusterNodes(client, options)
        """The nodes that are asked, and reached directly."""
        self._applied: list[Range] | None = None
        self._refreshed = NEVER  # local clock, from before the nodes were asked; NEVER while there is a doubt
        self._applied_at = NEVER  # the same for the newest answer, also while there is a doubt
        self._lock = threading.Lock()  # a client may be used in several threads, each with an event loop
        self._doubts = 0  # number of reports that the known slots are wrong
        # Until a node has answered, this shard has all slots; after that it is one of the shards.
        self._options = options
        self._numbers = itertools.count()
        self.shards: list[Shard] = [Shard(self, next(self._numbers), self._options)]
        self._owners = self.shards * REDIS_CLUSTER_HASH_SLOTS
        self._by_slot: WeakValueDictionary[int, Redis] = WeakValueDictionary()
        self._subscribers: list[WeakMethod[Callable[[], None]]] = []
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

    def subscribe(self, slots_moved: Callable[[], None]) -> None:
        """Call ``slots_moved`` when slots have another shard, or shards another primary, as long as its object lives.

        It is called in the thread that received the answer.
        """
        with self._lock:
            self._subscribers = [it for it in self._subscribers if it() is not None]
            self._subscribers.append(WeakMethod(slots_moved))

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

    def lost(self, node: NodeAddress | None) -> None:
        """Note that ``node`` said that it has lost a slot."""
        self._refreshed = NEVER
        self._doubts += 1
        if node is not None:
            self.nodes.ask_next(node)

    def down(self, node: NodeAddress | None) -> None:
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
        """Apply a new slot table; return the shards without slots."""
        if ranges is self._applied:
            return []
        self._applied = ranges
        self.nodes.update(ranges)
        owners, addresses = list(self._owners), [shard.address for shard in self.shards]
        starts: dict[NodeAddress, int] = {}
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
                if (slots_moved := subscriber()) is not None:
                    slots_moved()
        return gone

    def _shard(self, primary: NodeAddress, slot: int, primaries: dict[NodeAddress, int]) -> Shard:
        """Return the shard of a new primary, which has ``slot`` now."""
        shard = self._owners[slot]
        if shard.address in primaries:
            shard = Shard(self, next(self._numbers), self._options)
            self.shards.append(shard)
        # Else the shard that had the slot has lost its primary: one of its replicas was promoted.
        shard.lead_to(primary)
        return shard


# -- The servers behind a client: one server, or the shards of a cluster ---------------------------------------


class OneServer:
    """The server of a `Redis`."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def client_of(self, *keys: bytes) -> Redis:
        """Return the caller's client."""
        return self._client

    def clients(self) -> list[Redis]:
        """Return the caller's client."""
        return [self._client]

    def address_at(self, key: bytes) -> str:
        """Return the address of the server."""
        return address_of(self._client)


Topology: TypeAlias = OneServer | Cluster
"""The servers behind a client of the caller."""


def slot_of(client: Redis) -> int | None:
    """Return the hash slot that ``client``, from a `Topology`, is for; None if it is not of a cluster."""
    pool = client.connection_pool
    return pool.slot if isinstance(pool, SlotPool) else None


def servers_of(client: RedisClient) -> Topology:
    """Return the servers behind ``client``; for one cluster client always the same object."""
    return Cluster.of(client) if isinstance(client, RedisCluster) else OneServer(client)
