"""The nodes of a cluster: which one to ask which shard has which hash slots, and its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from weakref import ref

import redis.exceptions
from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .._core.clock import now
from .primary_pool import Address, following
from .redis_py import bared, opening, write
from .resp import pack

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
    nodes: list[Address]


def not_now(answer: str, slot: str | int, node: str) -> str:
    """Return the message that stands for the error replies MOVED and ASK: retry later."""
    state = "has moved" if answer == "MOVED" else "is being moved"
    return f"slot {slot} {state} to {node or 'another node'} ({answer})"


_ASK = re.compile(r"^ASK \d+ (.+):(\d+)$|is being moved to (.+):(\d+) \(ASK\)")


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
        self._nodes: list[Address] = []  # in the order in which they are asked
        self._hint: Address | None = None  # the node that the latest MOVED named, until it is asked
        self._failed: dict[Address, float] = {}  # local clock
        # The first nodes may be a name that always leads to the cluster; the client's manager forgets them, and so does
        # the client before redis-py 7.0.
        seeds = getattr(client, "startup_nodes", None) or client.nodes_manager.startup_nodes.values()
        self._seeds = [Address(node.host, int(node.port)) for node in seeds]
        self.seeds: str = ", ".join(f"{host}:{port}" for host, port in self._seeds[:3])
        """The addresses that the client was made with, for messages; at most three."""
        self._answer: tuple[Address, Any, list[Range]] | None = None  # the latest one: node, reply, meaning

    def ask_first(self, address: str) -> None:
        """Ask the node at ``address`` ("host:port") before all others next time, as it is likely to know."""
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            self._hint = Address(host, int(port))  # remapped later, as that may raise anything

    def ask_last(self, node: Address) -> None:
        """Ask all other nodes before ``node`` next time."""
        self._failed[node] = now()

    def update(self, ranges: list[Range]) -> None:
        """Keep the nodes that are in ``ranges``, in their order, and add new ones."""
        named = dict.fromkeys(node for it in ranges for node in it.nodes)
        known = set(self._nodes)
        self._nodes = [*(node for node in self._nodes if node in named), *(it for it in named if it not in known)]

    def node_of_ask(self, answer: str) -> Address | None:
        """Return the node that an ASK names, in the server's words or those of `not_now`; None for other answers."""
        found = _ASK.search(answer)
        return self._remapped(found[1] or found[3], int(found[2] or found[4])) if found else None

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

    def _candidates(self) -> list[Address]:
        """Return the nodes in the order in which to ask them.

        Each time another node is the first, since one node's answer may be old. The seeds, and nodes that failed
        lately, are the last.
        """
        client = self._client()
        startup = [] if client is None else client.nodes_manager.startup_nodes.values()
        known = list(dict.fromkeys((*self._nodes, *(Address(node.host, int(node.port)) for node in startup))))
        self._nodes = [*known[1:], known[0]]
        known += [seed for seed in self._seeds if seed not in known]
        self._failed = {node: failed for node, failed in list(self._failed.items()) if node in known}
        return sorted(known, key=lambda node: self._failed.get(node, 0.0))

    async def ask(self, node: Address) -> list[Range]:
        """Return the ranges of slots as ``node`` knows them."""
        async with self.connected(node) as connection:
            write(connection, pack((b"CLUSTER", b"SLOTS")))
            answer = await connection.read_response(disable_decoding=True, timeout=float("inf"))
        return await self._read(node, answer)

    async def _read(self, node: Address, answer: Any) -> list[Range]:
        """Return the ranges in the answer of ``node``: the same object if the answer is the same as before."""
        if self._answer is not None:
            source, before, ranges = self._answer
            # A node may not know its own address. Then the same answer of another node means something else.
            if before == answer and (source == node or all(_host(host) for _, _, *told in before for host, *_ in told)):
                return ranges
        addresses: dict[tuple[bytes | None, int], Address] = {}
        ranges = []
        for first, last, *nodes in answer:
            for host, port, *_ in nodes:
                if (host, port) not in addresses:
                    addresses[host, port] = self._remapped(_host(host) or node.host, port)
            ranges.append(Range(first, last, [addresses[host, port] for host, port, *_ in nodes]))
            if len(ranges) % RANGES_PER_TURN == 0:
                await asyncio.sleep(0)
        self._answer = node, answer, ranges
        return ranges

    @asynccontextmanager
    async def connected(self, node: Address) -> AsyncIterator[Any]:
        """Open a connection of redis-py to ``node``, whatever its role is; raise as redis-py does."""
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


def _host(named: bytes | None) -> str:
    return "" if named in (None, b"?") else named.decode()
