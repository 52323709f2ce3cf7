"""The first commands on each connection of a link, and the endpoint by which the server knows it from then on.

A server that restarts from a snapshot, or a replica that lagged when it was promoted, has an older queue: tickets that
this process was granted, or withdrew, long ago. Scripts take such tickets for alive while their inbox has a listener,
and would grant each of them for a whole `claim`, one after the other. So a link takes a new inbox whenever the server's
data have another history than the data behind the previous connection. Nobody listens to the former inbox, so the next
script drops all its tickets, and requests that still wait queue again (`LinkOwner.link_up`).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from contextlib import suppress
from typing import TypeVar

import redis.exceptions

from .._client.resp import Reply, ReplyError
from .._core.display import text
from .._core.keys import Endpoint, inbox_pattern
from .._scripts import load
from ..errors import PushUnavailable
from . import failures
from .connection import Connection

_LISTENERS = load("link/listeners")
_NO_EVAL = re.compile(r"\beval\b", re.IGNORECASE)
"""In an error reply that says that scripts are refused, and not a command in a script."""

FORMER = 8
"""Former inboxes that are remembered: a server may still have an old connection that listens to one."""

T = TypeVar("T")

_HISTORY = re.compile(rb"\bmaster_replid:([0-9a-f]+)")


class Handshake:
    """Sets up the connections of one link, one after the other."""

    alone = True
    """Whether no earlier connection can still have unread commands of ours."""

    def __init__(self, endpoint: Endpoint, response_timeout: float) -> None:
        self.endpoint = endpoint
        self.response_timeout = response_timeout
        self.inbox = endpoint.inbox
        self._former: deque[bytes] = deque(maxlen=FORMER)  # inboxes; connections that listen to them may still be open
        self._history = b""  # of the data behind the previous connection; empty if it is not known
        self._newest: tuple[object, int | None] | None = None  # newest connection: its address, and its id there
        self._heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def perform(self, connection: Connection) -> None:
        """Switch to RESP3, subscribe to the inbox and prove that messages arrive; retire the previous connection."""
        hello, client_id = connection.ask((b"HELLO", 3)), connection.ask((b"CLIENT", b"ID"))
        history = connection.ask((b"INFO", b"replication"))
        if not connection.named:
            _ignored(connection.ask((b"CLIENT", b"SETNAME", self.endpoint.shown)))
        if self._newest is not None:  # else no server has a ticket of ours, so there is no need to wait
            await self._follow(history)
        listeners = await self._subscribe(connection, hello)
        if self._newest is None:
            self._history = await self._history_of(history)
        else:
            self.alone = (listeners == 1 and not self._former) or await self._retire(connection, self._newest)
        self._newest = connection.leads_to, await self._client_id(client_id)

    async def _answer(self, answer: asyncio.Future[T]) -> T:
        """Return an answer, or raise the error in it; raise ConnectionError if it is overdue."""
        try:
            async with asyncio.timeout(self.response_timeout):
                return await answer
        except TimeoutError:
            overdue = f"no answer for {self.response_timeout:g} seconds while the connection was set up"
        raise redis.exceptions.ConnectionError(overdue)

    async def _follow(self, answer: asyncio.Future[Reply]) -> None:
        """Take a new inbox unless the server has the data that were behind the previous connection."""
        history = await self._history_of(answer)
        if not history or history != self._history:
            self._former.append(self.inbox)
            self.endpoint = self.endpoint.again()
            self.inbox = self.endpoint.inbox
        self._history = history

    async def _subscribe(self, connection: Connection, hello: asyncio.Future[Reply]) -> int:
        """Subscribe to the inbox; return the number of connections that listen to it.

        Scripts may reach another server than the subscription: a proxy in front of a cluster chooses a node for each.
        Then no script knows whether a waiter still listens, so waiters have to poll.
        """
        self._heard = asyncio.get_running_loop().create_future()
        subscribed = connection.ask((b"SUBSCRIBE", self.inbox))
        counted = connection.ask((b"EVAL", _LISTENERS.source, 0, self.inbox))
        _ignored(connection.ask((b"SUBSCRIBE", self.endpoint.presence)))
        rights = f"SUBSCRIBE and PUBLISH on {text(inbox_pattern(self.inbox))}"
        listeners: Reply = None
        for answer, what in ((hello, "RESP3 (HELLO 3)"), (subscribed, rights), (counted, rights)):
            try:
                listeners = await self._answer(answer)
            except ReplyError as error:
                if answer is not counted or not _NO_EVAL.search(str(error)):
                    raise failures.not_allowed(str(error), what) from error
                listeners = await self._published(connection, rights)
        if not listeners:
            raise PushUnavailable.counted_elsewhere(text(inbox_pattern(self.inbox)))
        await self._answer(self._heard)
        return int(listeners)

    async def _published(self, connection: Connection, rights: str) -> Reply:
        """Publish to the inbox where scripts are refused; return how many connections got the message."""
        try:
            return await self._answer(connection.ask((b"PUBLISH", self.inbox, b"")))
        except ReplyError as error:
            raise failures.not_allowed(str(error), rights) from error

    async def _retire(self, connection: Connection, newest: tuple[object, int | None]) -> bool:
        """Kill the previous connection if this server still has it; return whether only this one is left.

        Only then can no earlier command of ours be executed any more.
        """
        leads_to, client_id = newest
        with suppress(ReplyError):
            listeners = await self._listeners(connection)
            # At another server the id belongs to another client. If no other connection listens, this may be another
            # server, too: after a restart.
            if listeners > 1 and client_id is not None and leads_to == connection.leads_to:
                await self._answer(connection.ask((b"CLIENT", b"KILL", b"ID", client_id)))
                listeners = await self._listeners(connection)
            return listeners == 1
        return False

    async def _listeners(self, connection: Connection) -> int:
        """Return the number of connections that listen to this inbox or a former one, without patterns."""
        answer = await self._answer(connection.ask((b"PUBSUB", b"NUMSUB", self.inbox, *self._former)))
        return sum(answer[1::2])

    async def _history_of(self, answer: asyncio.Future[Reply]) -> bytes:
        """Return the id of the history of a server's data; empty if the user may not ask for it."""
        with suppress(ReplyError):
            found = _HISTORY.search(bytes(await self._answer(answer)))
            return found[1].strip(b"0") if found else b""
        return b""

    async def _client_id(self, answer: asyncio.Future[Reply]) -> int | None:
        """Return the id of a connection; None if the user may not ask for it."""
        with suppress(ReplyError):
            return int(await self._answer(answer))
        return None

    def forget(self) -> None:
        """Take a new inbox on the next connection: an abandoned ticket may be left in a queue."""
        self._history = b""

    def hear(self) -> None:
        """Note that the message arrived that proves the subscription."""
        if not self._heard.done():
            self._heard.set_result(None)

    def fail(self, connection: Connection, error: Exception) -> None:
        """End the handshake on ``connection``, which was lost."""
        for future in (*connection.pending, self._heard):
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_exception(error)
                future.exception()


def _ignored(answer: asyncio.Future[Reply]) -> None:
    """Ignore the answer, and an error in it: what was asked for is not needed."""
    answer.add_done_callback(lambda it: it.cancelled() or it.exception())
