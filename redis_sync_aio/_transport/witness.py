"""The witness of a link: a second connection to the same server, on which replicas confirm grants (WAIT).

WAIT blocks its connection, so on the link all renewals and requests would stay behind it. Here only grants do that have
to be confirmed, too.

WAIT counts the replicas that have all up to the last *write* of its own connection (before Redis 7.2: up to its last
command). Another connection wrote the grant: the link, or that of the process that handed it over. So each grant is
renewed here first. That is a write behind the grant, and proves that this server has it.

One WAIT is in flight at a time. Grants that come meanwhile are renewed together, and share the next one.

The witness is used only if its server has the data of the link's server (``master_replid``), and only as long as the
link keeps its connection. So a failover after the grant is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from .._client.redis_py import open_connection
from .._client.replies import TRANSIENT, answered, refusal
from .._core.cancellation import cancelled
from .._core.clock import now
from ..errors import CommandRefused, CoordinatorClosed, SyncError
from . import call as failures
from .call import Call
from .connection import Connection, Handshake
from .dialogues import Converse

if TYPE_CHECKING:
    from .link import Link

SLICE = 0.1
"""Most seconds that one WAIT blocks. Grants that come meanwhile wait for its end."""
PATIENCE = 0.25
"""Seconds by which an answer may be late."""
ATTEMPTS = 2
"""Attempts to confirm a grant: the first connection may have been lost without notice."""
MAY_PASS = TRANSIENT | {"MOVED", "ASK"}


@dataclass(eq=False, slots=True)
class Claim:
    """A grant that replicas have to confirm."""

    name: bytes
    renew: Callable[[], Call | None]
    """A function that sends a renewal by the witness. It returns None if the grant cannot be renewed."""
    replicas: int
    within: float  # seconds
    done: Callable[[Claim], None]
    """A function to call once: enough replicas have the grant, or its time is up, or there is an error."""
    found: int = 0
    """Number of replicas that had the grant when they were counted last."""
    error: SyncError | None = None
    """The error of a server that refuses to confirm grants, or of a coordinator that was closed."""
    why: str = "they could not be counted in time"
    """The reason that the latest attempt failed; empty if they were counted."""
    failures: int = 0
    call: Call | None = None
    """Its renewal on `connection`."""
    connection: Connection | None = None
    expires: float = 0.0
    timer: asyncio.TimerHandle = field(init=False)


class Witness:
    """Confirms the grants of one link. It connects when it is first needed."""

    def __init__(
        self, client: Redis, link: Link, handshake: Handshake, connect_timeout: float, converse: Converse
    ) -> None:
        self._client = client
        self._link = link
        self._handshake = handshake
        self._connect_timeout = connect_timeout
        self._converse = converse
        self._loop = asyncio.get_running_loop()
        self._claims: dict[Claim, None] = {}  # the oldest first
        self._connection: Connection | None = None
        self._latest: Connection | None = None  # also after its end
        self._beside: Connection | None = None  # the connection of the link that leads to the same server
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.alone: bool = True
        """True if no earlier connection can still have unread commands of ours."""

    def confirm(self, claim: Claim) -> None:
        """Count the replicas that have the grant of ``claim`` until there are enough, or its time is up."""
        claim.expires = now() + claim.within
        claim.timer = self._loop.call_later(claim.within + PATIENCE, self._end, claim)
        self._claims[claim] = None
        self._start()

    def forget(self, claim: Claim) -> None:
        """Confirm ``claim`` no longer, and do not call its ``done``."""
        if claim in self._claims:
            del self._claims[claim]
            claim.timer.cancel()

    def _end(self, claim: Claim, error: SyncError | None = None) -> None:
        if claim in self._claims:
            self.forget(claim)
            claim.error = error
            claim.done(claim)

    def send(self, call: Call) -> None:
        """Send a renewal before the next WAIT. Its script is sent in full if this connection has not had it."""
        assert self._connection is not None
        call.undoes = True
        self._connection.send(call)

    # -- the work, in a task while there is any --------------------------------------------------------

    def _start(self) -> None:
        if self._task is None and not self._closed:
            # Not by the loop's factory: an eager task could end before ``self._task`` is set. And it begins after all
            # grants that were read together.
            self._task = asyncio.Task(self._work(), loop=self._loop, name="redis_sync_aio witness")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Start again if the task was cancelled from outside, as `asyncio.run` does at its end."""
        self._task = None
        if self._claims:
            self._start()

    async def _work(self) -> None:
        while self._claims:
            try:
                await self._count(await self._connected())
            except (Exception, asyncio.CancelledError) as error:
                reason = failures.not_from_outside(error, self._closed)
                self._drop(reason)
                for claim in list(self._claims):
                    self._failed(claim, reason)

    def _failed(self, claim: Claim, reason: Exception) -> None:
        """Try again with another connection, once; end ``claim`` immediately if the server refuses for good."""
        refused = reason if isinstance(reason, CommandRefused) else answered(claim.name, reason)
        claim.connection, claim.why = None, failures.message_of(reason)
        claim.failures += 1
        if refused is not None and refused.code not in MAY_PASS:
            self._end(claim, refused)
        elif claim.failures == ATTEMPTS:
            self._end(claim)

    async def _connected(self) -> Connection:
        """Return a connection to the server behind the link."""
        beside = self._link.present_connection()
        if self._connection is not None and beside is self._beside:
            return self._connection
        self._drop(ConnectionResetError("the link has another connection"))
        if beside is None:
            raise ConnectionResetError("the connection to the server was lost")
        async with asyncio.timeout(self._connect_timeout):
            adopted = await open_connection(self._client, self._handshake.response_timeout)
            connection = self._latest = Connection(adopted, self._refused, lambda _: None, self._lost, self._converse)
            try:
                if self._closed:  # redis-py may swallow a cancellation on Python < 3.12
                    raise asyncio.CancelledError
                asked = [one.ask((b"INFO", b"replication")) for one in (beside, connection)]
                histories = [await self._handshake.history_of(answer) for answer in asked]
                if not histories[0] or histories[0] != histories[1]:
                    raise ConnectionResetError("a second connection leads to a server with other data than the first")
            except BaseException:
                connection.abort()
                raise
        self._handshake.name(connection)
        self._beside, self._connection = beside, connection
        return connection

    async def _count(self, connection: Connection) -> None:
        """Renew the grants that were not renewed on this connection, then WAIT once for all claims."""
        for claim in list(self._claims):
            if claim.connection is not connection:
                claim.connection, claim.call = connection, claim.renew()
                if claim.call is None:
                    self._end(claim)
        if not (claims := list(self._claims)):
            return
        fewest, left = min(claim.replicas for claim in claims), min(claim.expires for claim in claims) - now()
        block_ms = max(1, ceil(min(SLICE, left) * 1000))
        answer = connection.ask((b"WAIT", fewest, block_ms))
        overdue = TimeoutError("the server did not answer WAIT")
        timer = self._loop.call_later(block_ms / 1000 + PATIENCE, self._drop, overdue)
        try:
            count = int(await answer)
        finally:
            timer.cancel()
        if self._beside is not self._link.present_connection():
            raise ConnectionResetError("the connection to the server was lost")
        for claim in claims:
            if claim.call is None or not claim.call.over:
                continue  # its script was not known and is sent again: the next WAIT follows it
            if claim.call.error is not None:
                self._failed(claim, claim.call.error)
                continue
            claim.found, claim.why = count, ""
            if count >= claim.replicas or now() >= claim.expires:
                self._end(claim)

    # -- the connection --------------------------------------------------------------------------------

    def _refused(self, call: Call, message: str) -> None:
        """Take an error reply to a renewal: nothing was executed."""
        if message.startswith("NOSCRIPT") and self._connection is not None:
            self._connection.send_unknown(call)
        else:
            call.fail(refusal(call.name, message, keys=call.keys.all))

    def _lost(self, connection: Connection, error: Exception | None) -> None:
        """Fail the commands that were not answered on a connection that has ended."""
        if connection is self._connection:
            self._connection = None
        self.alone = False
        reason = error or ConnectionResetError("the server closed the connection")
        for receiver in connection.pending:
            if isinstance(receiver, Call):
                receiver.ambiguous = True
                receiver.fail(failures.unanswered(receiver.keys, reason))
            elif isinstance(receiver, asyncio.Future) and not receiver.done():
                receiver.set_exception(reason)
                receiver.exception()

    def _drop(self, reason: Exception) -> None:
        if (connection := self._connection) is not None:
            connection.abort()
            self._lost(connection, reason)

    def abandon(self) -> Connection | None:
        """Stop without the event loop; return the connection, which is the caller's to end."""
        self._closed = True
        return self._latest

    def stop(self) -> None:
        """Close the connection, and end all claims with CoordinatorClosed, without waiting for the end of the task."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._drop(ConnectionResetError("the coordinator was closed"))
        for claim in list(self._claims):
            self._end(claim, CoordinatorClosed.used("it was closed"))

    async def close(self) -> None:
        """Stop, and wait for the end of the task and of the connection."""
        self.stop()
        await cancelled(self._task)
        if self._latest is not None:
            await self._latest.gone
