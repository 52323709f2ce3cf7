"""One open connection: it takes bytes in, and gives replies and pushes out. It has no policy and never waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

import hiredis

from .._client.fork import dead_end
from .._client.redis_py import AdoptedConnection, hang_up
from .._client.resp import Reply, ReplyError, Words, pack
from .._core.clock import now
from .call import Call, not_understood
from .dialogues import Converse, DialogueQueue, Exchange

FLUSH_AFTER = 50
"""Commands that are written together in mid-turn: the server starts on them while we pack the others."""

BURST = 250
"""Replies that are read in one turn of the loop. The tasks that they wake run before the next ones are read."""

ANSWERING = 0.25
"""Seconds since a server was last heard within which it counts as one that answers."""

_NOTHING = object()


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
        self.dialogues = DialogueQueue(converse, self._exchange, self._on_error)
        self.heard = now()  # when anything was last received
        self.leads_to = adopted.leads_to
        self.named = adopted.named
        self.closed_by_us = False
        self._dropped: Exception | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()  # done when the transport is closed
        adopted.take(self)
        if adopted.leftover:
            self.data_received(adopted.leftover)

    @property
    def closed_by_client(self) -> bool:
        """Whether redis-py has closed it, because the caller closed the client or its pool."""
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
                if reply[0] == b"subscribe":
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
        future.exception()  # retrieved, as nobody awaits some replies of a handshake
    else:
        future.set_result(reply)
