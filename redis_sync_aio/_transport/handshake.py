"""What is said first on each new connection of a link, and the name by which the server knows it since then.

An older queue. A server that restarts from a snapshot, or a replica that lagged when it was promoted, has tickets in
its queues that this process was granted, or withdrew, long ago. To the scripts they look alive, since their inbox is
heard: each of them would be granted for a whole `claim`, one after the other. So a link takes a new inbox whenever the
data of the server have another history than those behind the previous connection. Nobody listens to the former inbox,
so the next script drops all its tickets; whatever still waits queues again (`LinkOwner.link_up`).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from contextlib import suppress

from .._client.resp import Reply, ReplyError
from .._core.display import text
from .._core.keys import INBOX_PREFIX, Endpoint
from . import failures
from .connection import Connection

FORMER = 8
"""How many inboxes are remembered: servers that lost sight of us may still have a connection that hears one."""

_HISTORY = re.compile(rb"\bmaster_replid:([0-9a-f]+)")


class Handshake:
    """Sets up the connections of one link, one after the other."""

    alone = True
    """Whether no command can be left on another connection than the newest."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.inbox = endpoint.inbox
        self._former: deque[bytes] = deque(maxlen=FORMER)  # inboxes; the connections that heard them may live yet
        self._history = b""  # of the data behind the previous connection; empty: not known
        self._newest: tuple[object, int | None] | None = None  # connection: where it led to, and its id there
        self._heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def perform(self, connection: Connection) -> None:
        """Switch to RESP3, subscribe the inbox and prove that it hears; retire the previous connection."""
        hello, client_id = connection.ask((b"HELLO", 3)), connection.ask((b"CLIENT", b"ID"))
        history = connection.ask((b"INFO", b"replication"))
        if self._newest is not None:  # else no server knows us: there is no need to wait for the answer
            await self._follow(history)
        listeners = await self._subscribe(connection, hello)
        if self._newest is None:
            self._history = await _history(history)
        else:
            self.alone = (listeners == 1 and not self._former) or await self._retire(connection, self._newest)
        self._newest = connection.leads_to, await _client_id(client_id)

    async def _follow(self, answer: asyncio.Future[Reply]) -> None:
        """Take a new inbox unless the server goes on with the data that were behind the previous connection."""
        history = await _history(answer)
        if not history or history != self._history:
            self._former.append(self.inbox)
            self.endpoint = self.endpoint.again()
            self.inbox = self.endpoint.inbox
        self._history = history

    async def _subscribe(self, connection: Connection, hello: asyncio.Future[Reply]) -> int:
        """Subscribe the inbox; return how many connections hear it."""
        self._heard = asyncio.get_running_loop().create_future()
        subscribed = connection.ask((b"SUBSCRIBE", self.inbox))
        published = connection.ask((b"PUBLISH", self.inbox, b""))
        rights = f"SUBSCRIBE and PUBLISH on {text(INBOX_PREFIX)}*"
        for answer, what in ((hello, "RESP3 (HELLO 3)"), (subscribed, rights), (published, rights)):
            try:
                await answer
            except ReplyError as error:
                raise failures.not_possible(str(error), what) from error
        await self._heard
        listeners: int = await published
        return listeners

    async def _retire(self, connection: Connection, newest: tuple[object, int | None]) -> bool:
        """Kill the previous connection if it lives on this very server; return whether none is left but this one.

        Only then can no command of ours be executed any more that was sent before.
        """
        leads_to, client_id = newest
        with suppress(ReplyError):
            listeners = await self._listeners(connection)
            # At another server the id would be somebody else's. If none of ours are left, this may be another one,
            # after a restart.
            if listeners > 1 and client_id is not None and leads_to == connection.leads_to:
                await connection.ask((b"CLIENT", b"KILL", b"ID", client_id))
                listeners = await self._listeners(connection)
            return listeners == 1
        return False

    async def _listeners(self, connection: Connection) -> int:
        """Return how many connections hear this inbox, or a former one; without those of patterns."""
        answer = await connection.ask((b"PUBSUB", b"NUMSUB", self.inbox, *self._former))
        return sum(answer[1::2])

    def forget(self) -> None:
        """Take a new inbox on the next connection: a ticket that nobody wants may be left in a queue."""
        self._history = b""

    def hear(self) -> None:
        """Note that the message arrived which proves that the inbox is heard."""
        if not self._heard.done():
            self._heard.set_result(None)

    def fail(self, connection: Connection, error: Exception) -> None:
        """End the handshake on ``connection``, which was lost."""
        for future in (*connection.pending, self._heard):
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_exception(error)
                future.exception()


async def _history(answer: asyncio.Future[Reply]) -> bytes:
    """Return what tells the history of a server's data from others; empty where it may not be asked for."""
    with suppress(ReplyError):
        found = _HISTORY.search(bytes(await answer))
        return found[1].strip(b"0") if found else b""
    return b""


async def _client_id(answer: asyncio.Future[Reply]) -> int | None:
    """Return the id of a connection; None where it may not be asked for."""
    with suppress(ReplyError):
        return int(await answer)
    return None
