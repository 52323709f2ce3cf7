"""The link: one connection that carries every command and every push between a coordinator and a server.

One connection, in RESP3. The commands of all tasks leave in one write per turn of the event loop, and replies and
pushes arrive in one ordered stream. So the reply to an enqueue precedes its grant, a clean-up cannot be overtaken by
the command that it cleans up, and the loss of the connection is one event, after which everything is checked again. The
link writes, not the task, so a cancelled task never leaves half a command.

Loss. Calls that were written and not answered are ambiguous. All our scripts are idempotent for their token, so these
calls are sent again on the next connection, in order, unless they were withdrawn. A call that expires fails with
`Unreachable`.

The old connection may still have unread commands in a buffer when the next one is in use. So a new connection first
kills the old one at the server, if it is still there and the ACL user may do so (CLIENT KILL ID). A command that still
gets through finds its token spent (see lock/acquire.lua), or its effect ends with the ttl.

Without pushes. A link whose endpoint has no inbox subscribes to nothing and needs no RESP3; its waiters poll.

Liveness. A connection on which a reply is overdue for `response_timeout` is dropped; the first reply after some seconds
of silence is overdue sooner (`PROMPT`), because a NAT may have dropped the connection without notice. While a
lease or a request depends on pushes, a PING goes out after `response_timeout` of silence. So a dead connection is
noticed within twice that time and a tick.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from redis.asyncio import Redis

from .._client.redis_py import AdoptedConnection
from .._client.replies import TRANSIENT, Reply, error_code, refusal, scripts_refused
from .._client.settings import health_check_interval_of
from .._core import logs
from .._core.clock import now
from .._core.display import text
from .._core.futures import Slices
from .._core.keys import Endpoint, Keys
from ..errors import SyncError, Unreachable
from ..errors._base import copy_error
from . import call as failures
from .call import Call, DeferredCalls
from .connection import ANSWERING, BURST, Connection, Connector, Handshake
from .dialogues import Converse, Dialogue, LocalInbox
from .endpoint import EndpointWatch
from .witness import Witness

# -- The calls of a link that are not in flight: they wait for a connection, or for their next attempt ---------


class CallQueue:
    """Keeps the order of the calls about one name: what was sent first is sent again first.

    Calls that ended meanwhile may still be in it; they are never sent.
    """

    def __init__(
        self,
        send_again: Callable[[Call], None],
        send_behind: Callable[[Call], None],
        in_use: Callable[[Connection], bool],
    ) -> None:
        self._send_again = send_again
        self._in_use = in_use
        self._loop = asyncio.get_running_loop()
        self.deferred = DeferredCalls(self._loop, send_again, send_behind)
        """Calls that the server refused for now, and what was sent about the same names since."""
        self.unsent: deque[Call] = deque()
        """Calls that wait for a connection."""
        self.sending = False
        """True if new calls have to go behind unsent ones, which are being sent, or follow when `hold` ends."""
        self._held: asyncio.Future[Reply] | None = None

    def __bool__(self) -> bool:
        return bool(self.unsent or self.deferred.delayed)

    def calls(self) -> Iterator[Call]:
        """Return all calls."""
        yield from self.unsent
        yield from self.deferred.calls()

    def hold(self, connection: Connection) -> None:
        """Keep new calls until what is in flight is answered: it will be refused, and is sent again before them."""
        self.sending, self._held = True, connection.ask((b"PING",))
        self._held.add_done_callback(lambda _: self.send_unsent(connection))  # an error is an answer, too

    def send_unsent(self, connection: Connection) -> None:
        """Send the calls that wait for ``connection``, in several turns of the loop, while it is in use."""
        if self._held is not None and not self._held.done():
            return
        self.sending = False
        for _ in range(min(BURST, len(self.unsent)) if self._in_use(connection) else 0):
            if not (call := self.unsent.popleft()).over:
                call.sent = now()
                self._send_again(call)
        if self.unsent and self._in_use(connection):
            self.sending = True
            self._loop.call_soon(self.send_unsent, connection)

    def put_back(self, unanswered: Iterable[tuple[Call, bool]]) -> None:
        """Keep the calls of a connection that has ended, before all others.

        Each comes with whether it may have been executed.
        """
        self._held = None  # its answer was lost
        resend: list[Call] = []
        for call, perhaps in unanswered:
            if call.over:
                continue
            call.ambiguous |= perhaps
            if call.at_most_once and perhaps:
                call.fail(
                    Unreachable(
                        f"the connection was lost before the reply about {text(call.name)!r} arrived: the command "
                        "may have been executed or not; check statistics()"
                    )
                )
            elif not self.deferred.join(call):
                resend.append(call)
        self.unsent.extendleft(reversed(resend))

    def forget_ended(self) -> None:
        """Drop unsent calls that have ended."""
        self.unsent = deque(call for call in self.unsent if not call.over)

    def hand_on(self, stays: Callable[[Call], bool]) -> None:
        """Keep unsent calls that ``stays`` selects, and send the others again, which go to other links."""
        unsent, self.unsent = self.unsent, deque()
        for call in unsent:
            if stays(call):
                self.unsent.append(call)
            elif not call.over:
                self._send_again(call)

    def take(self) -> list[Call]:
        """Remove and return all calls that have not ended."""
        calls = [call for call in (*self.unsent, *self.deferred.take()) if not call.over]
        self.unsent.clear()
        return calls


# -- The check that the connection of a link still answers, in every tick while there is a reason for it -------


MAX_TICK = 0.25
"""Most seconds between two ticks."""

RESTED = 2.0
"""Seconds of silence after which a connection may have been dropped without notice, as by a NAT, when it is used."""
PROMPT = 1.0
"""Seconds that the first answer on a connection that has rested may take."""


class Patience:
    """The seconds that an answer may take: fewer when the connection has rested.

    A ``health_check_interval`` of the client that is shorter than either limit takes its place.
    """

    def __init__(self, client: Redis, response_timeout: float) -> None:
        interval = health_check_interval_of(client)
        self.usual = response_timeout
        self.prompt: float = min(PROMPT, interval, response_timeout)
        self._rested = min(RESTED, interval)

    def after(self, silence: float) -> float:
        """Return the limit for a command that was sent after so many seconds of silence."""
        return self.prompt if silence > self._rested else self.usual


class Liveness:
    """Notices overdue replies, silent connections and connections that no longer lead to the right server."""

    def __init__(self, client: Redis, response_timeout: float, link: Link) -> None:
        self._patience = Patience(client, response_timeout)
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pinged = 0.0  # local clock
        self._due = math.inf  # the next tick, by the local clock
        self._resumed = 0.0  # when a tick was late for the last time: what is waited for may not have been sent before
        self._endpoint = EndpointWatch(client, link.drop)
        self._stopped = False

    def start(self) -> None:
        """Tick from now on, until the link has nothing to look at."""
        if self._timer is None and not self._stopped:
            tick = min(MAX_TICK, self._patience.prompt / 4)
            self._due = now() + tick
            self._timer = self._loop.call_later(tick, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if late := now() > self._due + MAX_TICK:
            self._resumed = now()
        self._link.tick(late)
        if (connection := self._link.present_connection()) is not None:
            self._check(connection)
        if self._link.goes_on():
            self.start()

    def _check(self, connection: Connection) -> None:
        needed, time = self._link.needed, now()
        oldest, heard = connection.oldest(self._pinged), connection.heard
        if oldest is not None:
            since = max(oldest, heard, self._resumed)
            limit = self._patience.after(max(oldest, self._resumed) - heard)
            if time - since > limit:
                self._link.drop(f"no answer for {limit:g} seconds")
        elif needed() and time - heard > self._patience.usual:
            self._pinged = time
            self._link.ping(connection)
        self._endpoint.check(connection, connection.leads_to, needed)

    def stop(self) -> None:
        """Stop ticking for good, and cancel the check of the endpoint without waiting for its end."""
        self._stopped = True
        self._endpoint.stop()
        if self._timer is not None:
            self._timer.cancel()

    def abandon(self) -> None:
        """Start no more ticks: there is no event loop, or it is the parent's."""
        self._stopped = True

    async def close(self) -> None:
        """Stop ticking for good, and wait for the end of the check of the endpoint."""
        self.stop()
        await self._endpoint.close()


_MESSAGES = b"message", b"smessage"
"""The kinds of pushes that bring what was published: by PUBLISH, and by SPUBLISH."""


class LinkOptions(NamedTuple):
    """Options of a link."""

    response_timeout: float
    """Seconds until a connection counts as dead because a reply is overdue."""
    connect_timeout: float
    """Seconds until an attempt to connect is given up."""
    converse: Callable[[Call, LocalInbox], Dialogue]
    """Starts one attempt at a call where scripts are not allowed."""


class LinkOwner(Protocol):
    """Receives the reports of a link. All methods are called from the event loop; none of them raises."""

    def link_pushed(self, payload: bytes) -> None:
        """Take a message that was published to the inbox."""

    def link_lost(self, server: str) -> None:
        """Note that the connection to ``server`` was lost."""

    def link_up(self, concerns: Callable[[Keys], bool], server: str, after: float | None) -> None:
        """Check all leases and requests that ``concerns`` selects: there is a new connection, to ``server``.

        ``after``: for how many seconds there was none since one was lost.
        """

    def link_moved(self) -> None:
        """Check which requests have another server now: hash slots have moved."""

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        """Fail the requests that ``concerns`` selects: connecting was refused for good."""

    async def link_closing(self) -> None:
        """Give back what can be given back: the caller closes the client, and the connection is still open."""

    def link_client_closed(self) -> None:
        """Close: the caller has closed the client."""

    def keys_in_use(self) -> Iterable[Keys]:
        """Return the keys of all names that are held or waited for. Read them before any of that changes."""
        ...


class Link:
    """Connects when first used, reconnects while it is needed.

    Its parts: `Connector` opens connections, `CallQueue` keeps what is not in flight, `Liveness` notices a connection
    that does not answer. The link sends calls, takes error replies, and settles what a lost connection left.
    """

    def __init__(self, client: Redis, endpoint: Endpoint, owner: LinkOwner, options: LinkOptions) -> None:
        """``endpoint``: one without an inbox for a link that carries no pushes."""
        self._owner = owner
        self._response_timeout, connect_timeout, converse = options
        self._handshake = Handshake(endpoint, self._response_timeout, self.in_shard)
        self._converse: Converse = lambda call: converse(call, LocalInbox(self._handshake.inbox, owner.link_pushed))
        self._no_scripts = ""  # the first error reply that refused EVALSHA, or EVAL
        self._no_eval = False  # whether EVAL was refused
        self._connection: Connection | None = None
        self.lost_at: float | None = None
        """When the latest connection was lost (local clock), if there was none since."""
        self._connector = Connector(client, self._handshake, connect_timeout, self)
        self._new_witness = partial(Witness, client, self, self._handshake, connect_timeout, self._converse)
        self._witness: Witness | None = None
        self._queue = CallQueue(self._send_again, self._send_behind, lambda connection: connection is self._connection)
        self._deferred = self._queue.deferred
        self._liveness = Liveness(client, self._response_timeout, self)
        self._slices = Slices(asyncio.get_running_loop())
        self._expiring = False  # a slice that fails expired calls is to follow
        self._head: object = None  # the oldest command in flight at the last tick
        self._closed = False

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Number of connections that were opened so far."""
        return self._connector.connections

    @property
    def connection_error(self) -> Exception | None:
        """The reason that there is no connection; None if there is one."""
        if self._connection is not None:
            return None
        return self._connector.error or self._connector.outage.silence()

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return why there is no connection; None if there is one."""
        return self.connection_error

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return True if the server is known to answer.

        ``stalled``: the event loop has not read for a while, so recent silence proves nothing.
        """
        return self._connection is not None and (stalled or now() - self._connection.heard < ANSWERING)

    def overdue(self) -> float:
        """Return for how many seconds the server has owed its oldest answer; 0.0 if it owes none."""
        if self._connection is not None:
            since = self._connection.oldest(self._connection.asked)
        else:
            since = self._queue.unsent[0].sent if self._queue.unsent else None
        return 0.0 if since is None else now() - since

    def endpoint_of(self, keys: Keys) -> Endpoint:
        """Return the endpoint by which the server knows us."""
        return self._handshake.endpoint

    @property
    def history(self) -> bytes:
        """The id of the history of the server's data; empty if it is not known."""
        return self._handshake.history

    def ping_after(self, silence: float) -> None:
        """Send a PING if the server has been silent for ``silence`` seconds, and owes no answer."""
        connection = self._connection
        if connection is not None and not connection.pending and now() - connection.heard > silence:
            self.ping(connection)

    @property
    def alone(self) -> bool:
        """True if no earlier connection can still have unread commands of ours."""
        return self._handshake.alone and (self._witness is None or self._witness.alone)

    def witness_of(self, keys: Keys) -> Witness:
        """Return the connection on which replicas confirm grants."""
        witness = self._witness = self._witness or self._new_witness()
        return witness

    # -- hooks for the link to a shard of a cluster ----------------------------------------------------

    def concerns(self, keys: Keys) -> bool:
        """Return whether calls on ``keys`` go through this link."""
        return True

    def in_shard(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint to have, with an inbox in the shard."""
        return endpoint

    async def check(self, connection: Connection) -> None:
        """Raise if a connection that is set up must not be used all the same."""

    def _send_again(self, call: Call) -> None:
        """Send a call that had to wait."""
        self.send(call)

    def _send_behind(self, call: Call) -> None:
        """Send a new call that had to wait for an earlier one about the same name."""
        self.send(call)

    def _interpret(self, message: str) -> str:
        """Return the error reply that ``message`` stands for."""
        return message

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Send ``call`` now, or as soon as there is a connection."""
        if self._deferred.delayed and self._deferred.keep_behind(call):
            return
        connection = self._connection
        if connection is None and self._closed:
            failures.too_late(call)
        elif connection is None or self._queue.sending:
            self._queue.unsent.append(call)
            self.connect()
        elif self._no_scripts or call.keys.engine == "watch":
            self._send_otherwise(connection, call)
        else:
            connection.send(call)

    def _send_otherwise(self, connection: Connection, call: Call) -> None:
        """Send ``call`` without EVALSHA: by EVAL, or as a dialogue under WATCH where that is refused, too."""
        if call.keys.engine == "watch" or (self._no_eval and call.keys.engine == "auto"):
            connection.dialogues.add(call)
        else:
            connection.send(call, with_source=True)

    def _note_refusal(self, connection: Connection, refused: str, message: str) -> None:
        """Note that a command for scripts is ``refused``, by ``message``."""
        if self._no_eval or (self._no_scripts and refused == "evalsha"):
            return
        self._no_scripts = self._no_scripts or message
        if refused == "eval":
            self._no_eval = True
            logs.log("watch_instead", why=self._no_scripts)
        self._queue.hold(connection)

    def _on_error(self, call: Call, message: str) -> None:
        """Deal with an error reply: nothing was executed."""
        message = self._interpret(message)
        code = error_code(message)
        if call.over:
            return
        if code == "NOSCRIPT" and self._connection is not None:
            self._connection.send_unknown(call)
        elif (
            self._connection is not None
            and (refused := scripts_refused(message))
            and (refused == "evalsha" or call.keys.engine == "auto")
        ):
            self._note_refusal(self._connection, refused, message)
            call.attempts -= 1  # it was not executed
            self._send_otherwise(self._connection, call)
        elif code in TRANSIENT:
            call.delayed_by(refusal(call.name, message))
            if now() >= call.expires:
                call.fail(failures.time_is_up(call))
                return
            self._deferred.add(call)
            if code == "READONLY":
                self.drop(message)
        else:
            call.fail(refusal(call.name, message, self._no_scripts, call.keys.all, call.ambiguous))

    # -- connecting -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start connecting, unless there is a connection or that is in progress."""
        if self._connection is None and not self._closed:
            self._connector.start()
            self._liveness.start()

    def new_connection(self, adopted: AdoptedConnection) -> Connection:
        """Return a connection of this link over what redis-py has opened."""
        adopted.before_closing = self._owner.link_closing
        return Connection(adopted, self._on_error, self._on_push, self._on_lost, self._converse)

    def needed(self) -> bool:
        """Return whether a lease or a request depends on pushes."""
        return any(map(self.concerns, self._owner.keys_in_use()))

    def needs_connection(self) -> bool:
        """Return whether a call, a lease or a request needs a connection."""
        return bool(self._queue) or self.needed()

    def established(self, connection: Connection) -> None:
        """Use ``connection`` from now on."""
        self._connection = connection
        # Before anything is sent: each lease and each request checks whether it is still what it was.
        lost_at, self.lost_at = self.lost_at, None
        after = None if lost_at is None else now() - lost_at
        self._owner.link_up(self.concerns, self._connector.outage.server(), after)
        self._queue.send_unsent(connection)

    def attempt_failed(self) -> None:
        """Fail the calls whose time is up; another attempt follows after a pause."""
        self._expire_calls()

    def nothing_answers(self, since: float, error: Exception) -> None:
        """Fail the calls that are as old as ``since`` (local clock): no server has ever answered this link."""
        self._slices.run(self._fail_first(since, error))

    def _fail_first(self, since: float, error: Exception) -> Iterator[None]:
        for call in list(self._queue.calls()):
            if call.begun <= since and not call.over:
                call.fail(failures.never_answered(call, self._connector.outage.server(), error))
            yield
        self._queue.forget_ended()

    def refused(self, error: Exception) -> None:
        """Fail all calls and requests: the server, or the client's configuration, does not allow a connection."""
        known = failures.refused_for_good(error)
        self._owner.link_refused(known, self.concerns)
        for call in self.take_unsent():
            call.fail(copy_error(known))

    def broken(self, error: BaseException) -> None:
        """Fail all calls: ``error`` is a defect that ended the attempts to connect."""
        for call in self.take_unsent():
            call.fail(failures.unanswered(call.keys, error))

    def take_unsent(self) -> list[Call]:
        """Hand over all calls that wait for a connection or for their next attempt."""
        return self._queue.take()

    # -- losing the connection -------------------------------------------------------------------------

    def _on_push(self, push: list[Reply]) -> None:
        if push[0] in _MESSAGES and push[1] == self._handshake.inbox:
            if push[2]:
                self._owner.link_pushed(push[2])
            else:
                self._handshake.hear(push[0])

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        """Replace a connection that ended without our doing, if one is needed."""
        if connection is not self._connection:
            self._handshake.fail(connection)
            return
        self._connection = None
        self._connector.error = error or ConnectionResetError("the server closed the connection")
        self._put_back(connection)
        if connection.closed_by_client:
            self._owner.link_client_closed()
        else:
            self.lost_at = now()
            self._owner.link_lost(self._connector.outage.server())
        # After the caller has closed the client, only what gives something back may connect again.
        if self._queue.unsent or (not connection.closed_by_client and self.needed()):
            self.connect()

    def _put_back(self, connection: Connection) -> None:
        """Queue unanswered calls to be sent again."""
        self._queue.put_back(connection.unanswered())

    def drop(self, why: str) -> None:
        """Give up the connection, and open another."""
        if self._connection is not None:
            self._connector.outage.dropped(why)
            self._connection.drop(ConnectionAbortedError(why))

    # -- every tick ------------------------------------------------------------------------------------

    def present_connection(self) -> Connection | None:
        """Return the connection in use, if there is one."""
        return self._connection

    def ping(self, connection: Connection) -> None:
        """Ask the server for a sign of life."""
        connection.ask((b"PING",))

    def tick(self, late: bool) -> None:
        """Fail the calls whose time is up, and tell the log of an outage that lasts."""
        self._connector.outage.check(self.connection_error)
        self._expire_calls(late)

    def goes_on(self) -> bool:
        """Return whether another tick is needed."""
        return self._connection is not None or self._connector.active or bool(self._deferred.delayed)

    def _expire_calls(self, late: bool = False) -> None:
        """Fail the calls whose time is up, some in each turn of the loop."""
        if not self._expiring:
            self._expiring = True
            self._slices.run(self._expire(late))

    def _expire(self, late: bool) -> Iterator[None]:
        time, connection = now(), self._connection
        calls = [(call, False) for call in self._queue.calls()]
        if connection is None:
            self._head = None
        else:
            head = connection.pending[0] if connection.pending else None
            # Replies come in order. While they do come, or may be there unread, those to the other calls follow.
            advances = late or (self._head is not None and head is not self._head)
            self._head = head
            calls += connection.dialogues.unanswered() if advances else connection.unanswered()
        for call, perhaps in calls:
            # Meanwhile it may have been answered, or sent again: then the next tick looks at it.
            expired = call.timed_out(time) if perhaps else time >= call.expires
            if expired and not call.over and call.sent <= time:
                call.ambiguous |= perhaps
                if call.undoes:
                    self._handshake.forget()
                call.fail(failures.time_is_up(call, self.connection_error))
            yield
        self._queue.forget_ended()
        self._expiring = False

    # -- the end ---------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Give up the connection in a forked child: it belongs to the parent process."""
        self._abandon(Connection.dead_end)

    def close_without_loop(self) -> None:
        """End the connection after the event loop was closed."""
        self._abandon(Connection.close_without_loop)

    def _abandon(self, end: Callable[[Connection], None]) -> None:
        self._closed = True
        self._slices.stop()
        self._liveness.abandon()
        witnessed = None if self._witness is None else self._witness.abandon()
        for connection in (self._connection, self._connector.abandon(), witnessed):
            if connection is not None:
                end(connection)
        self._connection = None

    def _end(self) -> Connection | None:
        """End for good; return the connection, which is being closed."""
        self._closed = True
        self._slices.stop()
        self._liveness.stop()
        self._connector.stop()
        if self._witness is not None:
            self._witness.stop()
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
        """Close the connection; calls in flight end with CoordinatorClosed."""
        connection = self._end()
        left = [*self.take_unsent(), *(call for call, _ in (connection.unanswered() if connection is not None else ()))]
        for call in left:
            call.fail(failures.closed(call))
        await self._connector.close()
        await self._liveness.close()
        if self._witness is not None:
            await self._witness.close()
        if connection is not None:
            await connection.gone
