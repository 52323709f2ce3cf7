"""One live connection: bytes in, replies and pushes out. No policy, no waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import hiredis

from .._clock import now
from .adopt import Adopted
from .call import Argument, Call, Reply, ReplyError

_NOTHING = object()

PackCommand = Callable[[tuple[Argument, ...]], bytes]
pack = cast("PackCommand", hiredis.pack_command)


class Wire(asyncio.Protocol):
    """Commands of all tasks in one write per turn of the event loop; replies matched in order.

    Invariant: ``pending`` holds the calls that were written and not answered, oldest first; a reply always
    belongs to the first of them. Pushes (RESP3) are told apart by their type and belong to nobody.
    """

    def __init__(
        self,
        adopted: Adopted,
        on_error: Callable[[Call, str], None],
        on_push: Callable[[list[Reply]], None],
        on_lost: Callable[[Wire, Exception | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._adopted = adopted
        self._transport = adopted.transport
        self._reader = hiredis.Reader(notEnoughData=_NOTHING, replyError=ReplyError)
        self._on_error = on_error
        self._on_push = on_push
        self._on_lost = on_lost
        self._out: list[bytes] = []
        self.pending: deque[Call] = deque()
        self.heard = now()  # when the server last said anything
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

    def send(self, call: Call, command: tuple[Argument, ...] | None = None) -> None:
        """Write ``call`` in this turn of the loop. ``call.sent`` must be not later than now."""
        call.attempts += 1
        self.pending.append(call)
        out = self._out
        if not out:
            self._loop.call_soon(self._flush)
        out.append(pack(command or call.command()))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self.closed_by_us:
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def data_received(self, data: bytes) -> None:
        self.heard = now()
        reader, pending = self._reader, self.pending
        reader.feed(data)
        while (reply := reader.gets()) is not _NOTHING:
            kind = type(reply)
            if kind is hiredis.PushNotification:
                self._on_push(reply)
                continue
            call = pending.popleft()
            if kind is ReplyError:
                self._on_error(call, str(reply))
            else:
                call.answer(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._adopted.lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)
        if not self.closed_by_us:
            self._on_lost(self, exc or self._dropped)

    def drop(self, why: Exception) -> None:
        """Close at once; ``on_lost`` is called in the next turn of the loop."""
        self._dropped = why
        self._transport.abort()

    def abort(self) -> None:
        """Close at once; ``on_lost`` is not called."""
        self.closed_by_us = True
        self._transport.abort()
