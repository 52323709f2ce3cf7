"""The part of a link that connects: it opens and sets up connections until one can be used, or is refused for good."""

from __future__ import annotations

import asyncio
from typing import Protocol

from redis.asyncio import Redis

from .._client.redis_py import AdoptedConnection, open_connection
from .._core import logs
from .._core.cancellation import cancellations, cancelled
from .._core.clock import now
from . import failures
from .connection import Connection
from .first_contact import FIRST_CONTACT, has_answered, is_refused, note_answer
from .handshake import Handshake
from .outage import RECONNECT, RESPITE, Outage

LASTED = 1.0
"""Seconds after which a connection that is lost may be replaced immediately."""


class Connecting(Protocol):
    """A link, as its connector knows it. Only ``check`` may raise."""

    def new_connection(self, adopted: AdoptedConnection) -> Connection:
        """Return a connection of the link over what redis-py has opened."""
        ...

    async def check(self, connection: Connection) -> None:
        """Raise if a connection that is set up must not be used all the same."""

    def connect(self) -> None:
        """Start connecting again."""

    def needs_connection(self) -> bool:
        """Return whether a call, a lease or a request needs a connection."""
        ...

    def established(self, connection: Connection) -> None:
        """Use ``connection`` from now on."""

    def attempt_failed(self) -> None:
        """Fail the calls whose time is up; another attempt follows after a pause."""

    def nothing_answers(self, since: float, error: Exception) -> None:
        """Fail the calls that are as old as ``since`` (local clock): no server has ever answered this link."""

    def refused(self, error: Exception) -> None:
        """Fail all calls and requests: connecting will never succeed."""

    def broken(self, error: BaseException) -> None:
        """Fail all calls: ``error`` is a defect that ended the attempts to connect."""


class Connector:
    """Connects one link, one connection after the other.

    Invariant: at most one task connects at a time, and none does once the connector is closed.
    """

    def __init__(self, client: Redis, handshake: Handshake, connect_timeout: float, link: Connecting) -> None:
        self._client = client
        self._handshake = handshake
        self._connect_timeout = connect_timeout
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._pauses = iter(RESPITE)  # while connections do not last
        self._since = -1.0  # when the newest connection was established
        self._closed = False
        self.opening: Connection | None = None
        """The connection that is being set up."""
        self.outage = Outage(client)
        self.error: Exception | None = None
        """The reason that the latest connection, or attempt to connect, has failed."""
        self.connections = 0
        """Number of connections that were established."""

    @property
    def active(self) -> bool:
        """Whether an attempt to connect, or the pause before the next one, is in progress."""
        return self._task is not None

    def start(self) -> None:
        """Start connecting, unless that is in progress."""
        if self._task is None and not self._closed:
            # Not by the loop's factory: an eager task could end before ``self._task`` is set.
            self.outage.begin()
            self._task = asyncio.Task(self._connect(), loop=self._loop, name="redis_sync_aio link")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Start again if the task was cancelled from outside and is still needed; report a defect."""
        if task.cancelled():
            # `asyncio.run` cancels all tasks at its end, and tasks that release then still need the connection.
            if self._task is task:
                self._task = None  # it was cancelled before it began
            if self._link.needs_connection():
                self._link.connect()
        elif (error := task.exception()) is not None:
            self._link.broken(error)
            logs.raise_later(error, of_task=True)

    async def _connect(self) -> None:
        """Try until a connection is established, connecting is refused for good, or nobody needs it."""
        try:
            await self._pause_after_a_short_connection()
            for delay in RECONNECT:
                begun = now()
                try:
                    connection = await self._open()
                except failures.REFUSED as error:
                    self.error = error
                    if not self._closed:  # else redis-py swallowed the cancellation
                        self._link.refused(error)
                    return
                except (Exception, asyncio.CancelledError) as error:
                    error = failures.not_from_outside(error, self._closed)
                    self.error = self.outage.failed(error, self._connect_timeout)
                    self._link.attempt_failed()
                    if is_refused(error) and not has_answered(self._client):
                        self._link.nothing_answers(begun - FIRST_CONTACT, self.error)
                    if self._closed or not self._link.needs_connection():
                        return
                    await asyncio.sleep(delay)
                else:
                    self._established(connection)
                    return
        finally:
            self._task = None
            self.outage.rest()

    async def _pause_after_a_short_connection(self) -> None:
        if now() - self._since < LASTED:
            await asyncio.sleep(next(self._pauses))
        else:
            self._pauses = iter(RESPITE)

    async def _open(self) -> Connection:
        # asyncio.timeout, not the socket timeouts of redis-py: those may be None.
        before = cancellations()
        async with asyncio.timeout(self._connect_timeout):
            adopted = await open_connection(self._client, self._handshake.response_timeout)
            connection = self.opening = self._link.new_connection(adopted)
            try:
                if self._closed or cancellations() > before:  # redis-py may swallow one on Python < 3.12
                    raise asyncio.CancelledError
                await self._handshake.perform(connection)
                self.outage.leads_to = connection.leads_to
                await self._link.check(connection)
            except BaseException:
                connection.abort()
                raise
            finally:
                self.opening = None
        return connection

    def _established(self, connection: Connection) -> None:
        if not self.connections:
            note_answer(self._client)
        self.outage.end()
        self.error = None
        self._since = now()
        self.connections += 1
        self._link.established(connection)

    def abandon(self) -> Connection | None:
        """Stop without the event loop; return the connection that was being set up, which is the caller's to end."""
        self._closed = True
        opening, self.opening = self.opening, None
        return opening

    def stop(self) -> None:
        """Stop connecting for good, without waiting for the end of the task."""
        self._closed = True
        if self._task is not None and self._task is not asyncio.current_task():  # that task may have been refused
            self._task.cancel()

    async def close(self) -> None:
        """Stop connecting for good, and wait for the end of the task."""
        task = self._task
        self.stop()
        await cancelled(task)
