"""The connection of a link: one that is open, its first commands, and how it is opened."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import hiredis
import redis.exceptions
from redis.asyncio import Redis

from .._client.redis_py import AdoptedConnection, dead_end, hang_up, open_connection
from .._client.replies import Reply, ReplyError, Words, pack
from .._core import logs
from .._core.cancellation import cancellations, cancelled
from .._core.clock import now
from .._core.display import text
from .._core.keys import Endpoint, inbox_pattern
from .._scripts import load
from ..errors import PushUnavailable, Unreachable
from . import call as failures
from .call import Call, not_understood
from .dialogues import Converse, DialogueQueue, Exchange
from .outage import (
    FIRST_CONTACT,
    RECONNECT,
    RESPITE,
    Outage,
    find_sentinel,
    has_answered,
    is_refused,
    longest_pause,
    note_answer,
)

if TYPE_CHECKING:
    from .link import Link

FLUSH_AFTER = 50
"""Commands that are written together in mid-turn: the server starts on them while we pack the others."""

BURST = 250
"""Replies that are read in one turn of the loop. The tasks that they wake run before the next ones are read."""

ANSWERING = 0.25
"""Seconds since a server was last heard within which it counts as one that answers."""

_NOTHING = object()
_CONFIRMATIONS = b"subscribe", b"ssubscribe"


class Connection(asyncio.Protocol):
    """Writes the commands of all tasks once per turn of the loop, or per `FLUSH_AFTER`, and matches replies in order.

    The write comes after the tasks that replies have woken, as these are likely to send commands: at the end of that
    turn, not at the beginning of the next one. A command is written immediately if nothing is pending and the previous
    one was answered before another was sent, because it is likely to stay the only one, too.

    Invariant: ``pending`` has the calls that were written and not answered, oldest first. A reply always belongs to
    the first of them. Pushes (RESP3) differ by their type, and belong to no call.
    """

    def __init__(
        self,
        adopted: AdoptedConnection,
        on_error: Callable[[Call, str], None],
        on_push: Callable[[list[Reply]], None],
        on_lost: Callable[[Connection, Exception | None], None],
        converse: Converse,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._adopted = adopted
        self._transport = adopted.transport
        self._reader = hiredis.Reader(notEnoughData=_NOTHING, replyError=ReplyError)
        self._report_error = on_error
        self._on_push = on_push
        self._on_lost = on_lost
        self._out: list[bytes] = []
        self._flush_scheduled = False
        self._more_to_read = False  # `_read_on` is scheduled
        self._sources: dict[bytes, float] = {}  # script -> when it was last sent in full
        self._since_idle = 0  # number of commands sent since none was pending
        self.pending: deque[Call | Exchange | asyncio.Future[Reply]] = deque()
        self.dialogues: DialogueQueue = DialogueQueue(converse, self._exchange, self._on_error)
        self.heard: float = now()  # when anything was last received
        self.asked: float = self.heard  # when `ask` last sent anything
        self.leads_to: tuple[str | None, int | None] = adopted.leads_to
        self.named: bool = adopted.named
        self.no_stream: str = adopted.no_stream
        self.closed_by_us: bool = False
        self._dropped: Exception | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()  # done when the transport is closed
        adopted.take(self)
        if adopted.leftover:
            self.data_received(adopted.leftover)

    @property
    def closed_by_client(self) -> bool:
        """True if redis-py has closed it, because the caller closed the client or its pool."""
        return self._adopted.closed_by_client

    def send(self, call: Call, with_source: bool = False) -> None:
        """Write ``call`` in this turn of the loop. ``call.sent`` must not be later than now."""
        call.attempts += 1
        if with_source or (call.undoes and call.script.sha not in self._sources):
            self._sources[call.script.sha] = now()
            self._write(call, pack(call.command(True)))
            return
        # All calls of a script on the same keys with the same number of arguments begin with the same bytes, which are
        # kept with the keys. Packed arguments begin with '*', their number in one digit (see `_head`), CR and LF.
        arguments = pack(call.arguments)
        kind = arguments[:2] + call.script.sha
        head = call.keys.heads.get(kind) or _head(call, kind, len(arguments))
        self._write(call, head + arguments[4:])

    def send_unknown(self, call: Call) -> None:
        """Write ``call`` again, whose script the server did not know: in full, unless another has brought it since.

        A source that was sent after ``call`` comes before its next copy. That is relied on once: behind a proxy, the
        other may have gone to another server.
        """
        brought = not call.relied and self._sources.get(call.script.sha, 0.0) > call.sent
        call.relied = True
        call.sent = now()
        call.attempts -= 1  # it was not executed
        self.send(call, with_source=not brought)

    def ask(self, words: Words) -> asyncio.Future[Reply]:
        """Send any command; return a future of its reply, which may be ReplyError."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.asked = now()
        self._write(future, pack(words))
        return future

    def _exchange(self, batch: list[Words], done: Callable[[list[Reply]], None]) -> None:
        """Send commands with no other command in between."""
        exchange = Exchange(len(batch), done)
        self.pending.extend([exchange] * (len(batch) - 1))
        self._write(exchange, b"".join(map(pack, batch)))

    def unanswered(self) -> Iterator[tuple[Call, bool]]:
        """Return the calls without a reply, in order for each name, each with whether it may have been executed."""
        for receiver in self.pending:
            if isinstance(receiver, Call):
                yield receiver, True
        yield from self.dialogues.unanswered()

    def oldest(self, asked: float) -> float | None:
        """Return when the oldest unanswered command was sent, None if there is none.

        ``asked`` is that time if the command was sent by `ask`.
        """
        if not self.pending:
            return None
        first = self.pending[0]
        return asked if isinstance(first, asyncio.Future) else first.sent

    def _write(self, receiver: Call | Exchange | asyncio.Future[Reply], data: bytes) -> None:
        pending, out = self.pending, self._out
        alone = not pending and self._since_idle == 1
        self._since_idle = 1 if not pending else self._since_idle + 1
        pending.append(receiver)
        out.append(data)
        if alone or len(out) == FLUSH_AFTER:
            self._flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self.closed_by_us and not self._transport.is_closing():
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def data_received(self, data: bytes) -> None:
        self.heard = now()
        self._reader.feed(data)
        if not self._more_to_read:
            self._read()

    def _read_on(self) -> None:
        if self._more_to_read:
            self._more_to_read = False
            try:
                self._read()
            except hiredis.ProtocolError as error:  # the transport does the same when data_received raises
                self.drop(error)

    def _read(self) -> None:
        gets, pending = self._reader.gets, self.pending
        for _ in range(BURST):
            if (reply := gets()) is _NOTHING:
                break
            kind = type(reply)
            if kind is hiredis.PushNotification:
                # In RESP3 the confirmation of SUBSCRIBE is a push, in its place among the replies; an error is a reply.
                if reply[0] in _CONFIRMATIONS:
                    _resolve(pending.popleft(), None)
                else:
                    self._on_push(reply)
                continue
            receiver = pending.popleft()
            if type(receiver) is Call:
                if kind is ReplyError:
                    self._on_error(receiver, str(reply))
                else:
                    receiver.answer(reply)
            elif type(receiver) is Exchange:
                receiver.put(reply)
            else:
                _resolve(receiver, reply)
        else:
            self._more_to_read = True
            self._loop.call_soon(self._read_on)
        if self._since_idle > 1 and not self._flush_scheduled:  # after the tasks that the replies woke
            self._flush_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _on_error(self, call: Call, message: str) -> None:
        """Pass on an error reply. If that raises, only this call fails, not the connection."""
        try:
            self._report_error(call, message)
        except Exception as error:
            call.fail(not_understood(call.name, error))

    def connection_lost(self, exc: Exception | None) -> None:
        while self._more_to_read and not self.closed_by_us:
            self._read_on()
        self._more_to_read = False
        self.dialogues.end()
        self._adopted.lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)
        if not self.closed_by_us:
            self._on_lost(self, exc or self._dropped)

    def drop(self, why: Exception) -> None:
        """Close immediately; ``on_lost`` is called in the next turn of the loop."""
        self._dropped = why
        self._transport.abort()

    def dead_end(self) -> None:
        """Give up the connection in a forked child: it belongs to the parent."""
        self.closed_by_us = True
        self.dialogues.end()
        dead_end(self._transport)
        self._adopted.leave()

    def close_without_loop(self) -> None:
        """End the connection after the event loop was closed."""
        self.closed_by_us = True
        self.dialogues.end()
        hang_up(self._transport)
        self._adopted.leave()

    def abort(self) -> None:
        """Close immediately; ``on_lost`` is not called."""
        self.closed_by_us = True
        self._transport.abort()


def _head(call: Call, kind: bytes, packed: int) -> bytes:
    """Keep and return the bytes before the arguments of ``call``, which are packed to ``packed`` bytes."""
    assert len(call.arguments) < 10, call.script
    whole = pack(call.command())
    head = call.keys.heads[kind] = whole[: len(whole) - packed + 4]
    return head


def _resolve(future: Call | Exchange | asyncio.Future[Reply], reply: Reply) -> None:
    if isinstance(future, (Call, Exchange)) or future.done():
        return
    if isinstance(reply, ReplyError):
        future.set_exception(reply)
        future.exception()  # retrieved, as some replies of a handshake are not awaited
    else:
        future.set_result(reply)


# -- The first commands on each connection of a link, and the endpoint by which the server knows it from then on
#
# A server that restarts from a snapshot, or a replica that lagged when it was promoted, has an older queue: tickets
# that this process was granted, or withdrew, long ago. Scripts take such tickets for alive while their inbox has a
# listener, and would grant each of them for a whole `claim`, one after the other. So a link takes a new inbox
# whenever the server's data have another history than the data behind the previous connection. No client listens to the
# former inbox, so the next script drops all its tickets, and requests that still wait queue again
# (`LinkOwner.link_up`).


_LISTENERS = load("link/listeners")
_NO_EVAL = re.compile(r"\beval\b", re.IGNORECASE)
"""In an error reply that says that scripts are refused, and not a command in a script."""

FORMER = 8
"""Former inboxes that are remembered: a server may still have an old connection that listens to one."""

T = TypeVar("T")

_HISTORY = re.compile(rb"\bmaster_replid:([0-9a-f]+)")


class Handshake:
    """Sets up the connections of one link, one after the other."""

    def __init__(self, endpoint: Endpoint, response_timeout: float, in_shard: Callable[[Endpoint], Endpoint]) -> None:
        self.endpoint: Endpoint = endpoint
        self._in_shard = in_shard
        self.alone: bool = bool(endpoint.inbox)
        """True if no earlier connection can still have unread commands of ours."""
        self.response_timeout: float = response_timeout
        self.inbox: bytes = endpoint.inbox
        self.clients: int = 0
        """Number of clients of the server, as of the newest connection; 0: it is not known."""
        self._former: deque[bytes] = deque(maxlen=FORMER)  # inboxes; connections that listen to them may still be open
        self.history: bytes = b""  # of the data behind the previous connection; empty if it is not known
        self._newest: tuple[object, int | None] | None = None  # newest connection: its address, and its id there
        self._heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()  # the kind of the message
        self._hello: asyncio.Future[Reply] | None = None  # the newest answer
        self._hung_up = 0  # times in a row that a connection was lost before that

    async def perform(self, connection: Connection) -> None:
        """Switch to RESP3, subscribe to the inbox and prove that messages arrive; retire the previous connection.

        Without an inbox nothing is needed, so that any proxy and any user will do.
        """
        if not self.endpoint.inbox:
            self.name(connection)
            return
        if connection.no_stream:
            raise PushUnavailable(f'{connection.no_stream}; use Coordinator(client, push="never") to poll instead')
        self._hello = hello = connection.ask((b"HELLO", 3))
        client_id = connection.ask((b"CLIENT", b"ID"))
        history = connection.ask((b"INFO", b"replication"))
        self.name(connection)
        if self._newest is not None:  # else no server has a ticket of ours, so there is no need to wait
            await self._follow(history)
        endpoint = self._in_shard(self.endpoint)
        listeners = await self._subscribe(connection, hello, endpoint)
        if endpoint.is_in_shard and self._heard.result() != b"smessage":
            # An older server, a user without the right, a proxy; or the slot has just left the shard.
            endpoint = endpoint.in_cluster()
            listeners = await self._subscribe(connection, hello, endpoint)
        self._use(endpoint)
        if self._newest is None:
            self.history = await self.history_of(history)
        else:
            self.alone = (listeners == 1 and not self._former) or await self._retire(connection, self._newest)
        self._newest = connection.leads_to, await self._client_id(client_id)

    def name(self, connection: Connection) -> None:
        """Show this process in CLIENT LIST, unless the caller's client has a name for the connection, or wants none."""
        if not connection.named:
            _ignored(connection.ask((b"CLIENT", b"SETNAME", self.endpoint.shown)))

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
        history = await self.history_of(answer)
        if not history or history != self.history:
            self._use(self._in_shard(self.endpoint.again()))
        self.history = history

    def _use(self, endpoint: Endpoint) -> None:
        """Take ``endpoint`` from now on."""
        if endpoint != self.endpoint:
            if self._newest is not None:  # else no connection has listened to the former one
                self._former.append(self.endpoint.inbox)
            self.endpoint = endpoint

    async def _subscribe(self, connection: Connection, hello: asyncio.Future[Reply], endpoint: Endpoint) -> int:
        """Subscribe to the inbox of ``endpoint``; return the number of connections that listen to it.

        Scripts may reach another server than the subscription: a proxy in front of a cluster chooses a node for each.
        Then no script knows whether a waiter still listens, so waiters have to poll.
        """
        self._heard, self.inbox = asyncio.get_running_loop().create_future(), endpoint.inbox
        subscribed = connection.ask((b"SUBSCRIBE", self.inbox))
        if endpoint.is_in_shard:
            _ignored(connection.ask((b"SSUBSCRIBE", self.inbox)))
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
        if isinstance(listeners, list):
            listeners, self.clients = listeners
        if not listeners:
            raise PushUnavailable(
                f"a script finds no listener on {text(inbox_pattern(self.inbox))}, although this connection has "
                "subscribed there: a proxy seems to send SUBSCRIBE and scripts to different servers, and pushed "
                "wake-ups need both at one. Connect without it (a cluster by RedisCluster), or use "
                'Coordinator(client, push="never") to poll instead'
            )
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

    async def history_of(self, answer: asyncio.Future[Reply]) -> bytes:
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
        self.history = b""

    def hear(self, kind: bytes) -> None:
        """Note that the message arrived that proves the subscription; ``kind``: to SPUBLISH, or to PUBLISH."""
        if not self._heard.done():
            self._heard.set_result(kind)

    def fail(self, connection: Connection) -> None:
        """End the handshake on ``connection``, which was lost."""
        self._hung_up = 0 if self._hello is None or self._hello.done() else self._hung_up + 1
        error = Unreachable("the connection was lost while it was being set up; check the server and the network")
        if self._hung_up > 1:  # a server that stops does so once
            error = Unreachable(
                f"the server closed the connection {self._hung_up} times at HELLO 3; if a proxy does not know that "
                'command, use Coordinator(client, push="never") to poll instead'
            )
        for future in (*connection.pending, self._heard):
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_exception(error)
                future.exception()


def _ignored(answer: asyncio.Future[Reply]) -> None:
    """Ignore the answer, and an error in it: what was asked for is not needed."""
    answer.add_done_callback(lambda it: it.cancelled() or it.exception())


# -- The part of a link that connects: it opens and sets up connections until one can be used, or is refused for good


LASTED = 1.0
"""Seconds after which a connection that is lost may be replaced immediately."""


class Connector:
    """Connects one link, one connection after the other.

    Invariant: at most one task connects at a time, and none does once the connector is closed.
    """

    def __init__(self, client: Redis, handshake: Handshake, connect_timeout: float, link: Link) -> None:
        self._client = client
        self._handshake = handshake
        self._connect_timeout = connect_timeout
        self._within = min(connect_timeout, handshake.response_timeout)
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
        """True if an attempt to connect, or the pause before the next one, is in progress."""
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
        """Try until a connection is established, connecting is refused for good, or it is not needed."""
        try:
            pause, overdue = self._first_pause(), 0
            for failed in count(1):
                if pause > 0:
                    await asyncio.sleep(pause)
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
                    overdue += now() - begun >= self._within
                    pause = self._pause(failed, overdue)
                else:
                    self._established(connection)
                    return
        finally:
            self._task = None
            self.outage.rest()

    def _pause(self, failed: int, overdue: int) -> float:
        """Return the pause before the next attempt, in seconds; the arguments are those of `longest_pause`."""
        return RECONNECT.random() * longest_pause(failed, overdue, self._handshake.clients, self._within)

    def _first_pause(self) -> float:
        """Return the pause before the first attempt, in seconds: longer if the last connection did not last."""
        lasted = now() - self._since >= LASTED
        if lasted:
            self._pauses = iter(RESPITE)
        # After a cut of many connections. An idle link may connect later, alone.
        lost_at = self._link.lost_at
        spread = 0.0 if lost_at is None else self._pause(0, 0) - (now() - lost_at)
        return max(spread, 0.0 if lasted else next(self._pauses))

    async def _open(self) -> Connection:
        # asyncio.timeout, not the socket timeouts of redis-py: those may be None.
        before = cancellations()
        async with asyncio.timeout(self._connect_timeout):
            if not has_answered(self._client):
                await find_sentinel(self._client, self._handshake.response_timeout)
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
