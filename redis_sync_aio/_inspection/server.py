"""One server, asked by plain commands that only read, over a connection of the caller's pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from .._client.checkout import OUT_OF_REACH, CheckedOut
from .._client.error_replies import answered, error_answer, with_own_errors
from .._client.resp import Replies, Reply, ReplyError, Words, pack
from .._client.settings import RedisClient, address_of
from .._core.keys import KEY_ENDINGS, Keys, keys_around
from .._engine.watch_dialogue import microseconds
from ..errors import PermissionDenied, Unreachable
from .parties import listening_in

COUNT = 1000
"""Keys that one SCAN looks at: less than a millisecond of the server's time."""
BATCH = 250
"""Names that are read in one round trip."""


class CheckOut(Protocol):
    """Checks out a connection; with ``fresh`` it opens one."""

    async def __call__(self, *, fresh: bool = False) -> CheckedOut: ...


class Server:
    """A server whose names are read."""

    def __init__(self, connection: CheckedOut) -> None:
        self._connection = connection
        self.address = connection.address
        self.time = 0
        """When it answered last, in microseconds by its own clock."""
        self._cursor: bytes | None = b"0"

    async def give_back(self) -> None:
        """Give the connection back."""
        await self._connection.give_back()

    async def give_up(self) -> None:
        """Close the connection after an error: it may be of no use any more."""
        self._connection.in_step = False
        await self._connection.give_back()

    async def ask(self, questions: Sequence[Sequence[Words]]) -> list[Replies]:
        """Send the commands of several names, and return the replies to each."""
        words: list[Words] = [(b"TIME",), *(words for commands in questions for words in commands)]
        found = await self._connection.exchange([pack(one) for one in words], raw=range(len(words)))
        replies = iter(with_own_errors(found))
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
        """Return of each channel whether anybody listens; nothing if the user may not ask that, or at a replica.

        The processes of an application are connected to its primary, so that nobody listens here says nothing of them.
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


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, ReplyError):
        raise reply
    return reply


@asynccontextmanager
async def opened(check_out: CheckOut) -> AsyncIterator[Server]:
    """Use a connection, and give it back in the end; raise OUT_OF_REACH.

    An idle connection may have been closed by a server that was restarted, so it is tried first. If it is of no use, a
    new one is opened in its place.
    """
    server = Server(await check_out())
    try:
        await server.ask([])
    except OUT_OF_REACH:
        await server.give_up()
        server = Server(await check_out(fresh=True))
    except BaseException:
        await server.give_up()
        raise
    try:
        yield server
    except BaseException:
        await server.give_up()
        raise
    await server.give_back()


async def heard(servers: Iterable[CheckOut], channels: set[bytes]) -> dict[bytes, bool]:
    """Return of each channel whether anybody listens at one of ``servers``; only of those that all of them told."""
    found = dict.fromkeys(channels, False)
    for check_out in servers:
        try:
            async with opened(check_out) as server:
                here = await server.listening(found)
        except OUT_OF_REACH:
            here = {}
        found = {channel: found[channel] or here[channel] for channel in here}
    return found


@asynccontextmanager
async def reading(client: RedisClient) -> AsyncIterator[None]:
    """Turn what goes wrong while names are read into our errors."""
    try:
        yield
    except (ReplyError, *OUT_OF_REACH) as error:
        refused = answered(b"", error)
        if refused is not None:
            if refused.code == "NOPERM":
                refused = PermissionDenied.of_inspection(str(error_answer(error)))
            raise refused from error
        raise Unreachable.of_inspection(address_of(client), error) from error


def batches(names: Sequence[Keys]) -> Iterator[Sequence[Keys]]:
    """Iterate over ``names``, so many at a time that others can use the server in between."""
    for first in range(0, len(names), BATCH):
        yield names[first : first + BATCH]
