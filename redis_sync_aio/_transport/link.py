"""The link: one RESP3 connection that carries every command and every push between a coordinator and a server.

Why one. Commands of all tasks leave in one write per turn of the loop, replies and pushes arrive in one ordered stream:
the reply to an enqueue precedes its grant, a clean-up can not be overtaken by what it cleans up (both go through the
same pipe), and a lost connection is one event, after which everything is re-checked. A task that is cancelled never
tears a command in half, since the link writes, not the task.

Losing it. Calls that were written and not answered are ambiguous; all our scripts are idempotent for their token, so
they are sent again on the next connection, in order, unless withdrawn. A call fails (`Unreachable`) when it expires.

The old connection may still have unread commands in a buffer somewhere when the next one is already in use. So a new
connection first kills the old one at the server, if it is still there (CLIENT KILL ID, if the ACL user may); what still
slips through finds its token spent (see lock/acquire.lua) or ends with its ttl.

Liveness. A connection on which an answer is overdue for `response_timeout` is dropped. While somebody depends on pushes
a PING goes out after as much silence, so a black-holed connection is noticed within twice that time and a tick.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from redis.asyncio import Redis

from .._client.error_replies import TRANSIENT, error_code, refusal, scripts_refused
from .._client.redis_py import open_connection
from .._client.resp import Reply
from .._core import logs
from .._core.cancellation import cancelled
from .._core.clock import now
from .._core.keys import Endpoint, Keys
from ..errors import Unreachable, copy_error
from . import failures
from .call import Call
from .connection import ANSWERING, BURST, Connection
from .deferred import DeferredCalls
from .dialogues import Converse, LocalInbox
from .endpoint import EndpointWatch
from .executor import LinkOptions, LinkOwner
from .handshake import Introduction
from .outage import RECONNECT, RESPITE, Outage


class Link:
    """Connects when first used, reconnects while it is needed."""

    pushes = True

    def __init__(self, client: Redis, endpoint: Endpoint, owner: LinkOwner, options: LinkOptions) -> None:
        self._client = client
        self._introduction = Introduction(endpoint)
        self._owner = owner
        self._response_timeout, self._connect_timeout, converse = options
        self._converse: Converse = lambda call: converse(call, LocalInbox(self._introduction.inbox, owner.link_pushed))
        self._no_scripts = ""  # how the server refused them
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._opening: Connection | None = None  # while it is set up
        self._pinged = 0.0
        self._respites = iter(RESPITE)
        self._since = -1.0  # when the newest connection was established
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: deque[Call] = deque()
        self._sending = False  # `_send_unsent` is in line
        self._retries = DeferredCalls(self._loop, self._send_again, self.send)
        self._ticking: asyncio.TimerHandle | None = None
        self._connection_error: Exception | None = None
        self._outage = Outage(client)
        self._endpoint_watch = EndpointWatch(client, self._drop)
        self._closed = False
        self.connections = 0

    @property
    def connection_error(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        return None if self._connection is not None else self._connection_error or self._outage.silence()

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return why there is no connection, if there is none."""
        return self.connection_error

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` is known to answer. ``stalled``: nobody listened lately."""
        return self._connection is not None and (stalled or now() - self._connection.heard < ANSWERING)

    def endpoint_of(self, keys: Keys) -> Endpoint:
        """Return what the server knows us as."""
        return self._introduction.endpoint

    @property
    def alone(self) -> bool:
        """Whether no command can be left on another connection than the present one."""
        return self._introduction.alone

    # -- what is otherwise in a cluster: see `links.ShardLink` -----------------------------------------

    def concerns(self, keys: Keys) -> bool:
        """Return whether its calls are about ``keys``."""
        return True

    def _send_again(self, call: Call) -> None:
        """Send a call that had to wait."""
        self.send(call)

    def _understood(self, message: str) -> str:
        """Return what an error answer says."""
        return message

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Send ``call`` now, or as soon as there is a connection."""
        if self._retries.delayed and self._retries.keeps_behind(call):
            return
        connection = self._connection
        if connection is None and self._closed:
            failures.too_late(call)
        elif connection is None or self._sending:
            self._unsent.append(call)
            self.connect()
        elif self._no_scripts or call.keys.engine == "watch":
            self._send_watching(connection, call)
        else:
            connection.send(call)

    def _send_watching(self, connection: Connection, call: Call) -> None:
        # Those that follow scripts that will be refused must be refused, too: else they would come before them.
        refused_soon = call.keys.engine == "auto" and any(type(earlier) is Call for earlier in connection.pending)
        if call.keys.engine == "lua" or refused_soon:
            connection.send(call)
        else:
            connection.dialogues.add(call)

    def _on_error(self, call: Call, message: str) -> None:
        """An error answer: nothing was executed."""
        message = self._understood(message)
        code = error_code(message)
        if call.over:
            return
        if code == "NOSCRIPT" and self._connection is not None:
            call.sent = now()
            call.attempts -= 1  # it was not executed
            self._connection.send(call, with_source=True)
        elif call.keys.engine == "auto" and scripts_refused(message) and self._connection is not None:
            if not self._no_scripts:
                self._no_scripts = message
                logs.watch_instead(message)
            call.attempts -= 1  # it was not executed
            self._connection.dialogues.add(call)
        elif code in TRANSIENT:
            call.connection_error = refusal(call.name, message)
            if now() >= call.expires:
                call.fail(failures.time_is_up(call))
                return
            self._retries.add(call)
            if code == "READONLY":
                self._drop(message)
        else:
            call.fail(refusal(call.name, message, self._no_scripts, call.keys.all, call.ambiguous))

    # -- connecting ------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start connecting, unless that is done or under way."""
        if self._connection is None and self._connecting is None and not self._closed:
            # Not by the loop's factory: an eager task may be over before it is known here.
            self._outage.begin()
            self._connecting = asyncio.Task(self._connect(), loop=self._loop, name="redis_sync_aio link")
            self._connecting.add_done_callback(self._connect_ended)
            self._start_ticking()

    def _connect_ended(self, task: asyncio.Task[None]) -> None:
        """Go on for those who need the connection when somebody cancelled the task; fail their calls after a defect."""
        if task.cancelled():
            # If not by us: `asyncio.run` cancels all tasks at its end, and those that release then need us still.
            if self._connecting is task:
                self._connecting = None  # it did not even begin
            if self._wanted():
                self.connect()
        elif (error := task.exception()) is not None:
            for call in self.take_unsent():
                call.fail(failures.unanswered(call.name, error))

    async def _connect(self) -> None:
        """Try until connected, refused for good, or no longer needed."""
        try:
            if now() - self._since < 1.0:  # it did not last: do not spin
                await asyncio.sleep(next(self._respites))
            else:
                self._respites = iter(RESPITE)
            for delay in RECONNECT:
                try:
                    connection = await self._open()
                except failures.REFUSED as error:
                    self._connection_error = error
                    self._refuse(error)
                    return
                except (Exception, asyncio.CancelledError) as error:
                    error = failures.not_from_outside(error, self._closed)
                    self._connection_error = self._outage.failed(error, self._connect_timeout)
                    self._expire_calls()
                    if self._closed or not self._wanted():
                        return
                    await asyncio.sleep(delay)
                else:
                    self._established(connection)
                    return
        finally:
            self._connecting = None
            self._outage.rest()

    async def _open(self) -> Connection:
        # asyncio.timeout, not the socket timeouts of redis-py: those may be None.
        async with asyncio.timeout(self._connect_timeout):
            adopted = await open_connection(self._client)
            adopted.before_closing = self._owner.link_closing
            events = self._on_error, self._on_push, self._on_lost
            connection = self._opening = Connection(adopted, *events, self._converse)
            try:
                if self._closed:  # redis-py may swallow a cancellation on Python < 3.12
                    raise asyncio.CancelledError
                await self._introduce(connection)
            except BaseException:
                connection.abort()
                raise
            finally:
                self._opening = None
        return connection

    async def _introduce(self, connection: Connection) -> None:
        await self._introduction.introduce(connection)
        self._outage.leads_to = connection.leads_to

    def _established(self, connection: Connection) -> None:
        self._connection = connection
        self._outage.end()
        self._connection_error = None
        self._since = now()
        self.connections += 1
        # Before anything else: every lease and every waiter looks whether it still is what it was.
        self._owner.link_up(self.concerns)
        self._send_unsent(connection)

    def _send_unsent(self, connection: Connection) -> None:
        self._sending = False
        for _ in range(min(BURST, len(self._unsent)) if connection is self._connection else 0):
            if not (call := self._unsent.popleft()).over:
                call.sent = now()
                self._send_again(call)
        if connection is self._connection and self._unsent:
            self._sending = True
            self._loop.call_soon(self._send_unsent, connection)

    def _wanted(self) -> bool:
        return bool(self._unsent or self._retries.delayed) or self._needed()

    def _needed(self) -> bool:
        return self._owner.link_needed(self.concerns)

    def _refuse(self, error: Exception) -> None:
        """The server, or the client's configuration, says no: everybody is told, nothing is retried."""
        if self._closed:  # and redis-py did not let the cancellation through
            return
        known = failures.refused_for_good(error)
        self._owner.link_refused(known, self.concerns)
        for call in self.take_unsent():
            call.fail(copy_error(known))

    def take_unsent(self) -> list[Call]:
        """Hand over all calls that wait for a connection or for their next attempt."""
        calls = [call for call in (*self._unsent, *self._retries.take()) if not call.over]
        self._unsent.clear()
        return calls

    # -- losing ----------------------------------------------------------------------------------------

    def _on_push(self, push: list[Reply]) -> None:
        if push[0] == b"message" and push[1] == self._introduction.inbox:
            if push[2]:
                self._owner.link_pushed(push[2])
            else:
                self._introduction.hear()

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        """The connection is gone without our doing."""
        if connection is not self._connection:
            self._introduction.fail(connection, Unreachable("the connection was lost while it was being set up"))
            return
        self._connection = None
        self._connection_error = error or ConnectionResetError("the server closed the connection")
        self._put_back(connection)
        if connection.closed_by_client:
            self._owner.link_client_closed()
        if self._unsent or (not connection.closed_by_client and self._needed()):
            self.connect()  # after the client's end for what gives back only

    def _put_back(self, connection: Connection) -> None:
        """Let what was not answered be sent again."""
        resend: list[Call] = []
        for call, perhaps in connection.unanswered():
            if call.over:
                continue
            call.ambiguous |= perhaps
            if call.once and perhaps:
                call.fail(failures.perhaps(call))
            elif not self._retries.joins(call):
                resend.append(call)
        self._unsent.extendleft(reversed(resend))

    def _drop(self, why: str) -> None:
        """Give up the connection and open another."""
        if self._connection is not None:
            self._outage.dropped(why)
            self._connection.drop(ConnectionAbortedError(why))

    def _start_ticking(self) -> None:
        if self._ticking is None and not self._closed:
            self._ticking = self._loop.call_later(min(0.25, self._response_timeout / 4), self._tick)

    def _tick(self) -> None:
        """Look for overdue answers, silent connections, calls whose time is up."""
        self._ticking = None
        connection, time = self._connection, now()
        self._outage.look(self.connection_error)
        self._expire_calls()
        if connection is not None:
            oldest = connection.oldest(self._pinged)
            if oldest is not None and time - max(oldest, connection.heard) > self._response_timeout:
                self._drop(f"no answer for {self._response_timeout} seconds")
            elif oldest is None and self._needed() and time - connection.heard > self._response_timeout:
                self._pinged = time
                connection.ask((b"PING",))
            self._endpoint_watch.check(connection, connection.leads_to, self._needed)
        if self._connection is not None or self._connecting is not None or self._retries.delayed:
            self._start_ticking()

    def _expire_calls(self) -> None:
        time, connection = now(), self._connection
        under_way: list[Call] = []
        for call, perhaps in connection.unanswered() if connection else ():
            if not perhaps or call.had_its_time(time):
                under_way.append(call)
                call.ambiguous |= perhaps
        for call in (*self._unsent, *self._retries.calls(), *under_way):
            if not call.over and time >= call.expires:
                if call.undoes:
                    self._introduction.forget()
                call.fail(failures.time_is_up(call, self.connection_error))
        self._unsent = deque(call for call in self._unsent if not call.over)

    # -- the end ---------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Forget the connection: it belongs to the parent process (after a fork)."""
        self._abandon(Connection.dead_end)

    def close_without_loop(self) -> None:
        """The event loop is closed: end the connection without it."""
        self._abandon(Connection.close_without_loop)

    def _abandon(self, end: Callable[[Connection], None]) -> None:
        self._closed = True
        for connection in (self._connection, self._opening):
            if connection is not None:
                end(connection)
        self._connection = self._opening = None

    def _end(self) -> Connection | None:
        """End for good; return the connection, which is being closed."""
        self._closed = True
        self._endpoint_watch.stop()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._connecting is not None and self._connecting is not asyncio.current_task():  # which was refused
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        return connection

    def detach(self) -> list[Call]:
        """Close the connection, and hand over all calls that were not answered."""
        connection = self._end()
        if connection is not None:
            self._put_back(connection)
        return self.take_unsent()

    async def close(self) -> None:
        """Close the connection; calls that are still under way end with CoordinatorClosed."""
        connecting, connection = self._connecting, self._end()
        left = [*self.take_unsent(), *(call for call, _ in (connection.unanswered() if connection is not None else ()))]
        for call in left:
            call.fail(failures.closed(call))
        await cancelled(connecting)
        await self._endpoint_watch.close()
        if connection is not None:
            await connection.gone
