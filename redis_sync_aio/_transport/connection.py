"""One live connection: bytes in, replies and pushes out. No policy, no waiting."""

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

FULL = 50
"""So many commands are written at once, in mid-turn: the server starts on them while we pack the others."""

BURST = 250
"""So many replies are taken in one turn of the loop: what they wake comes in between."""

ANSWERING = 0.25
"""Seconds since a server was last heard within which it counts as one that answers."""

_NOTHING = object()


class Connection(asyncio.Protocol):
    """Commands of all tasks in one write per turn of the event loop (or per `FULL`); replies matched in order.

    They are written behind the tasks that what arrived wakes, as those are likely to send something: at the end of
    that turn, and not at the beginning of the next one. A command is written at once when nothing is pending and the
    one before was answered before another was sent: it is likely to stay alone, too.

    Invariant: ``pending`` holds the calls that were written and not answered, oldest first; a reply always
    belongs to the first of them. Pushes (RESP3) are told apart by their type and belong to nobody.
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
        self._take_error = on_error
        self._on_push = on_push
        self._on_lost = on_lost
        self._out: list[bytes] = []
        self._due = False  # `_end_turn` is in line
        self._behind = False  # `_read_on` is in line
        self._known = set[bytes]()  # scripts that were sent in full
        self._company = 0  # how many commands were sent since none was pending
        self.pending: deque[Call | Exchange | asyncio.Future[Reply]] = deque()
        self.dialogues = DialogueQueue(converse, self._say, self._on_error)
        self.heard = now()  # when the server last said anything
        self.leads_to = adopted.leads_to
        self.closed_by_us = False
        self._dropped: Exception | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()  # done when the transport has let go
        adopted.take(self)
        if adopted.leftover:
            self.data_received(adopted.leftover)

    @property
    def closed_by_client(self) -> bool:
        """Whether redis-py closed it, because the caller closed the client or its pool."""
        return self._adopted.closed_by_client

    def send(self, call: Call, with_source: bool = False) -> None:
        """Write ``call`` in this turn of the loop. ``call.sent`` must be not later than now."""
        call.attempts += 1
        if with_source or (call.undoes and call.script.sha not in self._known):
            self._known.add(call.script.sha)
            self._write(call, pack(call.command(True)))
            return
        # The part that is the same for all calls of a script on the same keys with as many arguments is kept with them.
        # What is packed begins with '*', how many, CR and LF: in one digit, since no script takes ten (`_head`).
        arguments = pack(call.arguments)
        kind = arguments[:2] + call.script.sha
        head = call.keys.heads.get(kind) or _head(call, kind, len(arguments))
        self._write(call, head + arguments[4:])

    def ask(self, words: Words) -> asyncio.Future[Reply]:
        """Send any command; the future ends with its reply, or with ReplyError."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._write(future, pack(words))
        return future

    def _say(self, batch: list[Words], done: Callable[[list[Reply]], None]) -> None:
        """Send commands that nothing comes in between."""
        exchange = Exchange(len(batch), done)
        self.pending.extend([exchange] * (len(batch) - 1))
        self._write(exchange, b"".join(map(pack, batch)))

    def unanswered(self) -> Iterator[tuple[Call, bool]]:
        """Return the calls that are left, in their order for each name; and whether each may have been executed."""
        for receiver in self.pending:
            if isinstance(receiver, Call):
                yield receiver, True
        yield from self.dialogues.unanswered()

    def oldest(self, asked: float) -> float | None:
        """Return when the oldest command without an answer was sent; ``asked``: when that is, of what is asked for."""
        if not self.pending:
            return None
        first = self.pending[0]
        return asked if isinstance(first, asyncio.Future) else first.sent

    def _write(self, receiver: Call | Exchange | asyncio.Future[Reply], data: bytes) -> None:
        pending, out = self.pending, self._out
        alone = not pending and self._company == 1
        self._company = 1 if not pending else self._company + 1
        pending.append(receiver)
        out.append(data)
        if alone or len(out) == FULL:
            self._flush()
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._due = False
        self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self.closed_by_us and not self._transport.is_closing():
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def data_received(self, data: bytes) -> None:
        self.heard = now()
        self._reader.feed(data)
        if not self._behind:
            self._read()

    def _read_on(self) -> None:
        if self._behind:
            self._behind = False
            try:
                self._read()
            except hiredis.ProtocolError as error:  # the transport does the same with what data_received raises
                self.drop(error)

    def _read(self) -> None:
        gets, pending = self._reader.gets, self.pending
        for _ in range(BURST):
            if (reply := gets()) is _NOTHING:
                break
            kind = type(reply)
            if kind is hiredis.PushNotification:
                # In RESP3 the answer to SUBSCRIBE is a push, in its place among the replies; a refusal is a reply.
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
            self._behind = True
            self._loop.call_soon(self._read_on)
        if self._company > 1 and not self._due:  # behind whom that woke; one alone writes at once
            self._due = True
            self._loop.call_soon(self._end_turn)

    def _on_error(self, call: Call, message: str) -> None:
        """Let an error answer be dealt with. Whatever that raises concerns this call, and not the connection."""
        try:
            self._take_error(call, message)
        except Exception as error:
            call.fail(not_understood(call.name, error))

    def connection_lost(self, exc: Exception | None) -> None:
        while self._behind and not self.closed_by_us:
            self._read_on()
        self._behind = False
        self.dialogues.end()
        self._adopted.lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)
        if not self.closed_by_us:
            self._on_lost(self, exc or self._dropped)

    def drop(self, why: Exception) -> None:
        """Close at once; ``on_lost`` is called in the next turn of the loop."""
        self._dropped = why
        self._transport.abort()

    def dead_end(self) -> None:
        """Lead nowhere (in a forked child)."""
        self.closed_by_us = True
        self.dialogues.end()
        dead_end(self._transport)
        self._adopted.leave()

    def close_without_loop(self) -> None:
        """End without the event loop, which is closed."""
        self.closed_by_us = True
        self.dialogues.end()
        hang_up(self._transport)
        self._adopted.leave()

    def abort(self) -> None:
        """Close at once; ``on_lost`` is not called."""
        self.closed_by_us = True
        self._transport.abort()


def _head(call: Call, kind: bytes, packed: int) -> bytes:
    """Keep and return what comes before the arguments of ``call``, which take ``packed`` bytes by themselves."""
    assert len(call.arguments) < 10, call.script
    whole = pack(call.command())
    head = call.keys.heads[kind] = whole[: len(whole) - packed + 4]
    return head


def _resolve(future: Call | Exchange | asyncio.Future[Reply], reply: Reply) -> None:
    if isinstance(future, (Call, Exchange)) or future.done():
        return
    if isinstance(reply, ReplyError):
        future.set_exception(reply)
        future.exception()  # looked at: some answers of a handshake do not matter
    else:
        future.set_result(reply)
