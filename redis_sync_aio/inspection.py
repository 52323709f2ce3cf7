"""Looking at locks from outside: holders, waiters and their times, and what looks wrong.

    for name in await inspect(redis, "orders:*"):
        print(name.name, name.holders, name.waiters, name.problems)

It reads what stands on the server, so it needs no process of the application, and it changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import anyio

from ._client import replies as resp
from ._client.checkout import OUT_OF_REACH, CheckedOut, checkout
from ._client.cluster import Cluster, servers_of
from ._client.settings import Client, RedisClient, address_of, encode, response_timeout_of
from ._core.arguments import Name, count, require_bool
from ._core.display import shown as text_shown
from ._core.keys import BY_ENDING, KEY_ENDINGS, Keys, check_slot, checked_prefix, keys_around, lock_keys, permit_keys
from ._engine.watch_dialogue import microseconds
from ._inspection.reading import TRANSIENT, listening_in, reading_of
from ._inspection.views import HolderView, MarkView, NameView, Problem, WaiterView, check, compiled, exact
from ._leases.implicit import CoordinatorLike, client_of, prefix_of
from .errors import PermissionDenied, Unreachable
from .errors._base import page

__all__ = [
    "HolderView",
    "MarkView",
    "NameView",
    "Problem",
    "WaiterView",
    "escape",
    "inspect",
]

_ESCAPED = re.compile(r"([*?\[\]\\])")
_Connect: TypeAlias = Callable[..., Awaitable[CheckedOut]]
"""Checks out a connection of a server; with ``fresh=True`` it opens one."""
SECOND_LOOK = 0.1
"""Seconds after which a problem that may be just a moment is looked for again."""


def escape(name: str) -> str:
    """Return the pattern that only ``name`` matches, whatever characters it has."""
    if not isinstance(name, str):
        raise TypeError(f"name must be str, not {text_shown(name)}")
    return _ESCAPED.sub(r"\\\1", name)


async def inspect(
    client: Client | CoordinatorLike,
    pattern: Name = "*",
    *,
    limit: int = 1000,
    shown: int = 100,
    idle: bool = False,
    prefix: str | None = None,
) -> tuple[NameView, ...]:
    """Return the names that are held or waited for, sorted: locks, semaphores, read/write locks, events and so on.

    Only commands that read are sent, over a connection of the client's pool. SCAN finds the names, so the time grows
    with the number of keys on the server. A pattern without ``*``, ``?`` and ``[`` is a name, and nothing is searched
    for it.

    The facts about one name are not read at one moment. Names that come or go meanwhile may or may not be in the
    result. A lock of another library is found if a request has waited for it, or by its exact name.

    Args:
        client: A `redis.asyncio.Redis` (of Sentinel: the primary is asked), a `RedisCluster` (all primaries are), or a
            `Coordinator`.
        pattern: The pattern of the names, as for the KEYS command. A backslash takes its meaning from the next
            character. A ``[`` needs its ``]``.
        limit: How many names to return at most, 1 or more. If there are as many, there may be more.
        shown: How many holders and waiters of each name to list, 1 or more. All are counted.
        idle: Also return names without holders and waiters, as far as they are remembered; marks of jobs among them.
        prefix: The prefix of the coordinators whose names are looked for; names are shown without it. None: that of the
            `Coordinator` given, else none. Without a prefix, ``orders`` of a coordinator with the prefix ``app1:`` is
            found as ``app1:{orders}``.

    Raises:
        Unreachable: A server did not answer.
        CommandRefused: A server refused to search, or is a node of a cluster and the client is not one of a cluster.
            What a server refuses to show of one name is a problem of that name.
        TypeError, ValueError: An argument is bad. Nothing was sent.

    On cancellation nothing is left behind.

    Example:
        ```python
        from redis_sync_aio.inspection import inspect

        for found in await inspect(redis, "orders:*"):
            for problem in found.problems:
                print(found.name, problem)
        ```
    """
    source = client_of(client)
    wanted, limit, shown = encode(source, pattern, "pattern"), count(limit, "limit", 1), count(shown, "shown", 1)
    require_bool(idle, "idle")
    check(wanted)
    before = prefix_of(client) if prefix is None else checked_prefix(prefix)
    servers = servers_of(source)
    found: list[NameView] = []
    name, timeout = exact(wanted), response_timeout_of(source, None)
    async with _reading(source):
        if isinstance(servers, Cluster):
            if name is not None:
                check_slot(name, before)
            await servers.refresh()
        every = servers.clients()
        for one in every if name is None else [servers.client_of(*lock_keys(name, before).all)]:
            others = [partial(checkout, other, timeout) for other in every if other is not one]
            look = _Look(shown, idle, partial(_heard, others), isinstance(servers, Cluster))
            async with (
                _opened(partial(checkout, one, timeout)) as server,
                aclosing(_searched(server, wanted, before) if name is None else _named(name, before)) as search,
            ):
                async for names in search:
                    found += await look.at(server, names)
                    if len(found) >= limit:
                        return _sorted(found[:limit])
    return _sorted(found)


def _sorted(found: list[NameView]) -> tuple[NameView, ...]:
    return tuple(sorted(found, key=lambda view: (view.name, view.kind)))


async def _named(name: bytes, prefix: bytes) -> AsyncGenerator[Sequence[Keys], None]:
    yield [lock_keys(name, prefix), *(permit_keys(name, kind, prefix) for kind in BY_ENDING)]


async def _searched(server: _Server, pattern: bytes, prefix: bytes) -> AsyncGenerator[Sequence[Keys], None]:
    matches, known = compiled(pattern).fullmatch, set[bytes]()
    while (names := await server.scan(pattern, prefix)) is not None:
        new = [keys for keys in names if keys.id not in known and matches(keys.name)]
        known.update(keys.id for keys in new)
        for first in range(0, len(new), BATCH):  # others use the server in between
            yield new[first : first + BATCH]


@dataclass(frozen=True)
class _Look:
    """The options of one `inspect`, and the two reads that it makes."""

    shown: int
    idle: bool
    elsewhere: Callable[[set[bytes]], Awaitable[dict[bytes, bool]]]
    """Asks the other shards who listens: a process may hold a name of a shard to which it has not connected yet."""
    of_cluster: bool

    async def at(self, server: _Server, names: Sequence[Keys]) -> list[NameView]:
        """Return the views of ``names``. Read those again whose problems may last only a moment."""
        found = await self._read(server, names)
        unconfirmed = {keys: view for keys, view in found.items() if any(it.code in TRANSIENT for it in view.problems)}
        if not unconfirmed:
            return list(found.values())
        await anyio.sleep(SECOND_LOOK)
        again = await self._read(server, list(unconfirmed))
        for keys, before in unconfirmed.items():
            del found[keys]
            if keys in again:
                seen = {it.code for it in before.problems}
                view = again[keys]
                real = [it for it in view.problems if it.code in seen or it.code not in TRANSIENT]
                view = replace(view, problems=tuple(real))
                if self.idle or not view.idle:
                    found[keys] = view
        return list(found.values())

    async def _read(self, server: _Server, names: Sequence[Keys]) -> dict[Keys, NameView]:
        readings = [(keys, reading_of(keys, self.shown)) for keys in names]
        replies = await server.ask([it.first_asked(server.time) for _, it in readings])
        told = [
            (keys, it)
            for (keys, it), reply in zip(readings, replies, strict=True)
            if it.first(reply, server.time) or self.idle
        ]
        if not self.of_cluster and (moved := next((it.moved for _, it in readings if it.moved), None)) is not None:
            raise moved  # the caller took the node of a cluster for a server
        told = [(keys, it) for keys, it in told if it.known]
        if not told:
            return {}
        listening = await server.listening(channel for _, it in told for channel in it.channels())
        if absent := {presence for _, it in told for presence in it.absent(listening)}:
            here = {channel: heard for channel, heard in listening.items() if channel not in absent}
            listening = here | await self.elsewhere(absent)
        replies = await server.ask([it.then_asked() for _, it in told])
        views = {
            keys: it.view(reply, server.address, listening) for (keys, it), reply in zip(told, replies, strict=True)
        }
        return {keys: view for keys, view in views.items() if self.idle or not view.idle}


# -- One server, asked by plain commands that only read, over a connection of the caller's pool ----------------


COUNT = 1000
"""Keys that one SCAN looks at: less than a millisecond of the server's time."""
BATCH = 250
"""Names that are read in one round trip."""


class _Server:
    """A server whose names are read."""

    def __init__(self, connection: CheckedOut) -> None:
        self._connection = connection
        self.address = connection.address
        self.time = 0
        """Time of its latest answer, in microseconds by its own clock."""
        self._cursor: bytes | None = b"0"

    async def give_back(self) -> None:
        """Give the connection back."""
        await self._connection.give_back()

    async def give_up(self) -> None:
        """Close the connection after an error: it may be of no use any more."""
        self._connection.in_step = False
        await self._connection.give_back()

    async def ask(self, questions: Sequence[Sequence[resp.Words]]) -> list[resp.Replies]:
        """Send the commands of several names, and return the replies to each."""
        words: list[resp.Words] = [(b"TIME",), *(words for commands in questions for words in commands)]
        found = await self._connection.exchange([resp.pack(one) for one in words], raw=range(len(words)))
        replies = iter(resp.with_own_errors(found))
        self.time = microseconds(_checked(next(replies)))
        return [[next(replies) for _ in commands] for commands in questions]

    async def scan(self, pattern: bytes, prefix: bytes) -> list[Keys] | None:
        """Return the names whose keys the next step of a SCAN finds, those of each once; None when it has ended."""
        if self._cursor is None:
            return None
        match = b"%b*%b*%b" % (prefix, pattern, KEY_ENDINGS)
        ((reply,),) = await self.ask([[(b"SCAN", self._cursor, b"MATCH", match, b"COUNT", COUNT)]])
        cursor, keys = _checked(reply)
        self._cursor = None if cursor == b"0" else cursor
        return list(dict.fromkeys(found for key in keys if (found := keys_around(key, prefix)) is not None))

    async def listening(self, channels: Iterable[bytes]) -> dict[bytes, bool]:
        """Return for each channel whether it has a listener; nothing if the user may not ask that, or at a replica.

        The processes of an application are connected to its primary, so a channel without a listener here says nothing
        of them.
        """
        asked = sorted(set(channels))
        if not asked:
            return {}
        ((reply,),) = await self.ask([[(b"PUBSUB", b"NUMSUB", *asked)]])
        found = listening_in(reply)
        return found if all(found.values()) or not await self._replica() else {}

    async def _replica(self) -> bool:
        """Return whether this server is known to be a replica."""
        ((reply,),) = await self.ask([[(b"INFO", b"replication")]])
        return isinstance(reply, bytes) and b"role:slave" in reply


def _checked(reply: resp.Reply) -> resp.Reply:
    if isinstance(reply, resp.ReplyError):
        raise reply
    return reply


@asynccontextmanager
async def _opened(connect: _Connect) -> AsyncIterator[_Server]:
    """Use a connection, and give it back in the end; raise OUT_OF_REACH.

    An idle connection may have been closed by a server that was restarted, so it is tried first. If it is of no use, a
    new one is opened in its place.
    """
    server = _Server(await connect())
    try:
        await server.ask([])
    except OUT_OF_REACH:
        await server.give_up()
        server = _Server(await connect(fresh=True))
    except BaseException:
        await server.give_up()
        raise
    try:
        yield server
    except BaseException:
        await server.give_up()
        raise
    await server.give_back()


async def _heard(servers: Iterable[_Connect], channels: set[bytes]) -> dict[bytes, bool]:
    """Return for each channel whether it has a listener at one of ``servers``; only where all of them answered."""
    found = dict.fromkeys(channels, False)
    for connect in servers:
        try:
            async with _opened(connect) as server:
                here = await server.listening(found)
        except OUT_OF_REACH:
            here = {}
        found = {channel: found[channel] or here[channel] for channel in here}
    return found


@asynccontextmanager
async def _reading(client: RedisClient) -> AsyncIterator[None]:
    """Turn errors of reading names into our errors."""
    try:
        yield
    except (resp.ReplyError, *OUT_OF_REACH) as error:
        refused = resp.answered(b"", error)
        if refused is not None:
            if refused.code == "NOPERM":
                refused = PermissionDenied(
                    f"the server refused to show names: {resp.error_answer(error)} (extend the ACL rule of this user; "
                    f"{page('operations/inspection', 'rights')} has the rights that this needs)",
                    code="NOPERM",
                )
            raise refused from error
        raise Unreachable(
            f"{address_of(client)} did not answer while its names were read: "
            + f"{type(error).__name__}: {error}".rstrip(": .")
            + "; check the server and the network"
        ) from error
